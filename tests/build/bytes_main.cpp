// Prints one line per case, "name digest", of the bytes that the library writes. Compiled by
// several compilers with several flag sets; bytes.cmake requires that all print the same.
// Placeholder: no case yet.
#include <kvarn/kvarn.hpp>

int main() { return 0; }
