#!/bin/sh
# Runs clang-tidy over every library header, by means of the generated files that the header test
# compiles. Uses (and configures) the build tree of the preset "clang".
set -eu
cd "$(dirname "$0")/.."
build=build/clang
cmake --preset clang >/dev/null

# Findings in one header, and in the *.inl files that it includes; others report their own.
check_header() {
  generated=$(echo "${1#include/}" | tr / .).cpp
  pattern=$(echo "$1" | sed 's/\./\\./g')
  clang-tidy --quiet -p "$build" --header-filter="($pattern|kvarn/.*\\.inl)\$" \
    "$build/tests/build/headers/$generated" 2>&1
}

status=0
# Another architecture's kernels, which the generated files leave out.
echo "clang-tidy include/kvarn/simd/dispatch.hpp for AArch64"
clang-tidy --quiet --header-filter='kvarn/simd/.*' include/kvarn/simd/dispatch.hpp -- -x c++ -std=c++20 -Iinclude \
  --target=aarch64-linux-gnu 2>&1 | grep -v '^[0-9]* warnings\{0,1\} generated\.$' && status=1
for header in $(find include/kvarn -name '*.hpp' ! -path 'include/kvarn/cuda/*' | sort); do
  echo "clang-tidy $header"
  findings=$(check_header "$header") || status=1
  echo "$findings" | grep -v '^[0-9]* warnings\{0,1\} generated\.$' || true
done
exit $status
