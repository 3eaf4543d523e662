// kvarn-demo: what every quantiser costs on keys, values and queries of real models.
#include <iostream>

#include "cli.hpp"

int main(int argc, char** argv) {
  return kvarn_demo::run_cli(argc, argv, KVARN_DEMO_DATA_DIR, std::cout, std::cerr);
}
