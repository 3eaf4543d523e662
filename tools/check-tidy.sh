#!/bin/sh
# Runs clang-tidy over every library header, by the one-line files that the header test compiles.
#
#   tools/check-tidy.sh [BUILD_DIR]   BUILD_DIR: a build configured with tests by clang; default
#                                     build/clang, configured here if it does not exist
set -eu
cd "$(dirname "$0")/.."
build=${1:-build/clang}
[ -f "$build/compile_commands.json" ] || cmake --preset clang -B "$build"

# Each header's findings are reported once, with the file named after it; those of the *.inl files
# that it includes come with it.
check_header() {
  header=$1
  name=$(echo "kvarn/${header#include/kvarn/}" | tr / .)
  pattern=$(echo "$header" | sed 's/\./\\./g')
  clang-tidy --quiet -p "$build" --header-filter="($pattern|kvarn/.*\\.inl)\$" \
    "$build/tests/build/headers/$name.cpp"
}

status=0
for header in $(find include/kvarn -name '*.hpp' ! -path 'include/kvarn/cuda/*' | sort); do
  echo "clang-tidy $header"
  check_header "$header" || status=1
done
exit $status
