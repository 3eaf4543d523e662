#!/bin/sh
# Compiles the tests of format/, codec/ and simd/ for AArch64 and runs them under qemu's user mode:
# the library on another architecture, and its NEON kernels, attention among them, against the
# scalar code.
#
#   tools/test-aarch64.sh [build directory, else build/aarch64]
#
# About five minutes on two cores. Needs, on Debian: g++-aarch64-linux-gnu, qemu-user, googletest,
# libeigen3-dev, nlohmann-json3-dev. The programs are static; nothing of AArch64 is installed.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build/aarch64}
gtest=/usr/src/googletest/googletest
directories="simd codec format" # split into words below on purpose

# The host's own include path stays out of sight, so its header-only library gets one of its own.
mkdir -p "$build/include"
ln -sfn /usr/include/nlohmann "$build/include/nlohmann"

export CXX=aarch64-linux-gnu-g++
export FLAGS="-std=c++20 -O2 -Wall -Wextra -Wconversion -Wpedantic -Wno-psabi -Werror
  -Iinclude -Itests -I. -isystem $build/include -isystem /usr/include/eigen3
  -isystem $gtest/include -DKVARN_TEST_DATA_DIR=\"tests/data\""

# Pairs of a source file and its object, compiled side by side. As in tests/CMakeLists.txt only simd_test
# has kernels of its own.
{
  for source in gtest-all gtest_main; do
    echo "$gtest/src/$source.cc $build/$source.o"
  done
  echo "include/kvarn/compiled_kernels.cpp $build/kernels.o"
  for source in tests/support/*.cpp; do
    echo "$source $build/support.$(basename "$source" .cpp).o"
  done
  for directory in $directories; do
    for source in tests/$directory/*_test.cpp; do
      echo "$source $build/$directory.$(basename "$source" .cpp).o"
    done
  done
} | GTEST=$gtest xargs -P "$(nproc)" -L 1 sh -c '
  case $0 in
    tests/simd/* | tests/support/*) exec $CXX $FLAGS -c "$0" -o "$1" ;;
    tests/* | include/*) exec $CXX $FLAGS -DKVARN_COMPILED_KERNELS -c "$0" -o "$1" ;;
    *) exec $CXX -std=c++20 -O1 -isystem "$GTEST/include" "-I$GTEST" -c "$0" -o "$1" ;;
  esac'

for directory in $directories; do
  # The linker warns of getaddrinfo in a static program; no test resolves names.
  $CXX -static "$build/$directory".*_test.o "$build"/support.*.o "$build/kernels.o" \
    "$build/gtest-all.o" "$build/gtest_main.o" -pthread \
    -o "$build/${directory}_test" 2>"$build/link.log" || { cat "$build/link.log" >&2; exit 1; }
done

# One shard of the tests for each processor. Not the death tests: the host would have to start an
# AArch64 program.
for directory in $directories; do
  printf '\n%s under qemu-aarch64\n' "${directory}_test"
  seq 0 $(($(nproc) - 1)) | GTEST_TOTAL_SHARDS=$(nproc) xargs -P "$(nproc)" -I '{}' \
    env GTEST_SHARD_INDEX='{}' qemu-aarch64 "$build/${directory}_test" --gtest_brief=1 \
    --gtest_filter=-*DeathTest*
done
