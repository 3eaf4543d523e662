#include "method.hpp"

#include <stdexcept>
#include <utility>

#include "kvarn/baselines/baselines.hpp"
#include "kvarn/codec/encoder.hpp"
#include "kvarn/format/tile_layout.hpp"

namespace kvarn_eval {

namespace {

std::string with_bits(std::string_view name, int key_bits, int value_bits) {
  return std::string(name) + "_k" + std::to_string(key_bits) + "v" + std::to_string(value_bits);
}

// Cuts "_kXvY" off a name.
bool cut_bits(std::string_view& name, int& key_bits, int& value_bits) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  if (name.size() < 5) return false;
  const std::string_view end = name.substr(name.size() - 5);
  if (end[0] != '_' || end[1] != 'k' || end[3] != 'v' || !digit(end[2]) || !digit(end[4]))
    return false;
  key_bits = end[2] - '0';
  value_bits = end[4] - '0';
  name.remove_suffix(end.size());
  return true;
}

}  // namespace

method find_method(std::string_view name) {
  method m{.name = std::string(name)};
  if (name == "fp16") return m;
  const auto cut = [&](std::string_view end) {
    const bool found = name.ends_with(end);
    if (found) name.remove_suffix(end.size());
    return found;
  };
  m.native = cut("_native");
  m.int8 = cut("_int8");
  const bool has_bits = cut_bits(name, m.key_bits, m.value_bits);

  for (const kvarn::encoder_info& info : kvarn::encoder_infos)
    if (has_bits && !m.native && info.name == name) {
      m.kind = storage::packed;
      m.encoder = info.id;
      return m;
    }
  m.kind = storage::baseline;
  m.baseline = kvarn::find_baseline(name);
  if (m.baseline != nullptr && !m.int8) {
    if (!has_bits) {
      m.key_bits = m.baseline->widths.front().key;
      m.value_bits = m.baseline->widths.front().value;
    }
    return m;
  }

  std::string known = "fp16";
  for (const kvarn::encoder_info& info : kvarn::encoder_infos)
    known.append(" ").append(with_bits(info.name, 2, 2));
  for (const kvarn::baseline& b : kvarn::baselines) known.append(" ").append(b.name);
  throw std::runtime_error(
      "method is '" + m.name + "'; allowed are " + known +
      ", with other bits as _k4v2 at the end, then encoders with _int8 and baselines with _native");
}

std::vector<std::string> all_method_names() {
  std::vector<std::string> names;
  for (const kvarn::baseline& b : kvarn::baselines)
    for (const kvarn::kv_bits& bits : b.widths) names.push_back(kvarn::variant_name(b, bits));
  for (const char* name : {"kivi_native", "turbo_vllm_native"}) names.emplace_back(name);
  for (const auto& bits : {std::pair{2, 2}, {4, 2}, {3, 3}, {4, 4}})
    for (const kvarn::encoder_info& info : kvarn::encoder_infos)
      names.push_back(with_bits(info.name, bits.first, bits.second));
  names.emplace_back("fp16");
  return names;
}

kvarn::exact_policy policy_of(const method& m, const layout& l) {
  if (m.native) return m.baseline->native;
  return kvarn::equal_for_all(static_cast<std::size_t>(l.sink), 0,
                              static_cast<std::size_t>(l.group));
}

kvarn::baseline_settings settings_of(const method& m, const layout& l, int head_dim,
                                     kvarn::tile_kind kind) {
  return {.kind = kind,
          .bits = kind == kvarn::tile_kind::key ? m.key_bits : m.value_bits,
          .head_dim = head_dim,
          .token_group = l.group};
}

double bits_per_element(const method& m, const layout& l, int layers, int head_dim, int tokens) {
  if (m.kind == storage::exact) return 16;
  if (m.kind == storage::packed) {
    kvarn::cache_format format{.key_bits = m.key_bits, .value_bits = m.value_bits};
    format.key_head_dim = format.value_head_dim = head_dim;
    format.group = l.group;
    return 8.0 * static_cast<double>(format.page_bytes(1)) / (2.0 * l.group * head_dim);
  }
  const kvarn::exact_policy policy = policy_of(m, l);
  double bits = 0;
  for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value}) {
    const auto settings = settings_of(m, l, head_dim, kind);
    bits += m.native ? kvarn::sequence_bits_per_element(*m.baseline, settings, policy.of(kind),
                                                        static_cast<std::size_t>(tokens)) /
                           2
                     : m.baseline->bits_per_element(settings) / 2;
  }
  int exact = 0;
  for (int layer = 0; layer < layers; ++layer)
    exact += kvarn::is_exact_layer(policy, layer, layers) ? 1 : 0;
  return bits + (16 - bits) * exact / layers;
}

}  // namespace kvarn_eval
