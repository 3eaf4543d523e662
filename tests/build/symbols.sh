#!/bin/sh
# Usage: symbols.sh NM OBJDUMP OLD_OBJECT NEW_OBJECT
#
# The linker keeps one copy of an inline function for a whole program. Fails if two objects,
# compiled for x86-64 and for a newer instruction set, both define
#  1. a function of the library: it must always be inlined, have internal linkage or live in the
#     namespace that is named after the instruction set. Errors are excepted: they cross translation
#     units, so their type must be one;
#  2. a function of any library whose newer copy has instructions that the old processor lacks.
set -eu
nm=$1 objdump=$2 old=$3 new=$4

functions() { "$nm" --defined-only "$1" | awk '$2 == "W" { print $3 }' | sort -u; }
shared=$(printf '%s\n%s\n' "$(functions "$old")" "$(functions "$new")" | sort | uniq -d)
if [ -z "$shared" ]; then
  echo "the objects share no function at all: this script no longer sees what it checks"
  exit 1
fi

# kvarn::error, kvarn::status, kvarn::result.
own=$(echo "$shared" | grep -E '^_ZNK?O?R?5kvarn' |
  grep -vE '^_ZNK?O?R?5kvarn(5error|6status|6resultI)' || true)
if [ -n "$own" ]; then
  echo "both objects define functions of the library:"
  echo "$own" | c++filt
  exit 1
fi

# The VEX encoding (names with v), and BMI.
newer=$("$objdump" -d --no-show-raw-insn "$new" | awk '
  /^[0-9a-f]+ <.*>:$/ { name = substr($2, 2, length($2) - 3); next }
  $2 ~ /^v[a-z]/ && $2 !~ /^ver[rw]$/ { print name }
  $2 ~ /^(andn|bextr|bls(i|r|msk)|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx)$/ { print name }' | sort -u)
if [ -z "$newer" ]; then
  echo "no newer instruction in $new: this script no longer sees what it checks"
  exit 1
fi
unsafe=$(printf '%s\n%s\n' "$shared" "$newer" | sort | uniq -d)
if [ -n "$unsafe" ]; then
  echo "both objects define, and the newer copy is not for every processor:"
  echo "$unsafe" | c++filt
  exit 1
fi
echo "$(echo "$shared" | wc -l) functions are shared, none of them the library's or unsafe:"
echo "$shared" | c++filt
