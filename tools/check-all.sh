#!/usr/bin/env bash
# The checks beyond .ci/run, about an hour on two cores: warnings as errors on both compilers, the
# sanitizers, clang-tidy, the demo and the benchmark build.
set -euo pipefail
cd "$(dirname "$0")/.."

section() { printf '\n==== %s ====\n\n' "$*"; }

section "Tests: g++, warnings as errors"
cmake --preset test -D KVARN_WARNINGS_AS_ERRORS=ON
cmake --workflow --preset test

section "Tests: clang++"
cmake --workflow --preset clang

section "Tests: address and undefined-behaviour sanitizers"
cmake --workflow --preset sanitize

section "Tests that use threads: thread sanitizer"
cmake --workflow --preset sanitize-threads

section "clang-tidy: library headers"
tools/check-tidy.sh

section "Demo"
cmake --workflow --preset demo

section "Benchmarks: build only"
cmake --preset bench
cmake --build --preset bench --target kvarn-bench

section "All passed"
