#!/bin/sh
# Usage: macros.sh CXX INCLUDE_DIR
#
# Fails if a header of the library defines a macro, even for a while, or if including them
# all leaves one behind, whose name does not start with KVARN_. The second rule also catches an
# unbalanced target region, which leaves macros such as __AVX2__.
set -eu
cxx=$1
include_dir=$2

# Not eigen.hpp, whose foreign includes need a path of their own, nor what nvcc compiles.
headers=$(cd "$include_dir" && find kvarn -name '*.hpp' ! -name eigen.hpp ! -path 'kvarn/cuda/*' | sort)
preprocess() {
  for header in $headers; do echo "#include <$header>"; done |
    "$cxx" -std=c++20 -x c++ -E "$1" -I "$include_dir" -
}

# -dD prints every #define after a line marker ("# LINE FILE FLAGS") that names its file;
# -dM prints the macros that are left at the end.
all=$(preprocess -dD)
left=$(preprocess -dM)

printf '%s\n=left\n%s\n' "$all" "$left" | awk -v ours="\"$include_dir/" '
  $0 == "=left"          { left = 1; next }
  $1 == "#" && !left     { own = index($0, ours) > 0; files += own; next }
  $1 != "#define"        { next }
  { name = $2; sub(/\(.*/, "", name) }
  left && !(name in foreign) && name !~ /^KVARN_/ { bad[name] = "left behind" }
  !left && !own          { foreign[name] = 1 }
  !left && own           { count++ }
  !left && own && name !~ /^KVARN_/ { bad[name] = "defined by a header" }
  END {
    for (name in bad) { print "macro without our prefix: " name " (" bad[name] ")"; failed = 1 }
    if (files == 0) { print "no header of the library was seen below " ours; failed = 1 }
    print count + 0 " macro definitions of the library were checked"
    exit failed
  }'
