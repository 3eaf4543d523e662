// One function, compiled for two instruction sets, that uses the library in its own translation
// unit. LINK_UNIT is its name. What it calls here is what symbols.sh can check: add a call for
// every part of the library that has functions.
#include <cstdint>
#include <kvarn/kvarn.hpp>

std::uint64_t LINK_UNIT();

std::uint64_t LINK_UNIT() {
  std::uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a
  const auto add = [&digest](std::uint64_t value) { digest = (digest ^ value) * 0x100000001b3u; };

  float value = 0x1p-20f;
  for (int i = 0; i < 400; ++i, value *= 1.0625f) {
    add(kvarn::float16(value).bits);
    add(kvarn::ue5m3(value).bits);
    add(kvarn::e4m3(value).bits);
  }
  return digest;
}
