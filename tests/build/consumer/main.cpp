// The smallest user of the library: includes the umbrella header from an installed or embedded
// copy.
#include <kvarn/kvarn.hpp>

int main() { return 0; }
