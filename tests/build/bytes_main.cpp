// Prints one line per case, "name digest", of the bytes that the library writes. Compiled by
// several compilers with several flag sets; bytes.cmake requires that all print the same and that
// none fails, which it does where a target of this machine differs from the scalar one.
//
// The inputs are the same everywhere too: integer arithmetic and exact conversions only.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <kvarn/kvarn.hpp>
#include <string>
#include <vector>

namespace {

// FNV-1a over bytes in the order of their significance.
class digest {
 public:
  void add(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i)
      state_ = (state_ ^ ((value >> (8 * i)) & 0xffu)) * 0x100000001b3u;
  }
  void add(float value) { add(kvarn::bits_of(value), 4); }
  void add(kvarn::float16 value) { add(value.bits, 2); }
  void add(kvarn::bfloat16 value) { add(value.bits, 2); }
  void add(std::byte value) { add(static_cast<std::uint64_t>(value), 1); }
  template <class T>
  void add(const std::vector<T>& values) {
    for (const T value : values) add(value);
  }
  friend bool operator==(const digest&, const digest&) = default;
  void print(const std::string& name) const {
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(state_));
  }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325u;
};

// SplitMix64 (G. Steele et al., OOPSLA 2014).
class source {
 public:
  explicit source(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // A sum of four uniform numbers: mean 0, standard deviation 2365, magnitude below 2^13.
  int bell() {
    const std::uint64_t z = next();
    return static_cast<int>(z >> 52) + static_cast<int>((z >> 40) & 0xfffu) +
           static_cast<int>((z >> 28) & 0xfffu) + static_cast<int>((z >> 16) & 0xfffu) - 8190;
  }

 private:
  std::uint64_t state_;
};

constexpr float kNaN = __builtin_nanf("");
constexpr float kInfinity = __builtin_inff();

enum class flavour { ordinary, offset, outliers, tiny, huge, constant, zero, damaged };
constexpr int flavours = 8;

// tokens x dim numbers, row-major: integers of magnitude below 2^24 times a power of two.
std::vector<float> vectors(int tokens, int dim, std::uint64_t seed, flavour kind) {
  source random(seed);
  std::vector<float> x;
  x.reserve(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(dim));
  for (int t = 0; t < tokens; ++t)
    for (int d = 0; d < dim; ++d) {
      int value = random.bell();
      float unit = 0x1p-11f;
      switch (kind) {
        case flavour::ordinary:
          break;
        case flavour::offset:
          value = value / 64 + (d % 5 == 0 ? 600000 : -40000);
          break;
        case flavour::outliers:
          value *= (d == 3 || d == 17 ? 40 : 1) * (t % 50 == 7 ? 10 : 1);
          break;
        case flavour::tiny:
          unit = 0x1p-37f;
          break;
        case flavour::huge:
          unit = 0x1p2f;
          break;
        case flavour::constant:
          value = d % 2 == 0 ? 5000 : t * 16;
          break;
        case flavour::zero:
          value = 0;
          break;
        case flavour::damaged:
          value = t == 2 ? 0 : value;
          break;
      }
      x.push_back(static_cast<float>(value) * unit);
    }
  if (kind == flavour::damaged) {
    x[5] = kNaN;
    x[static_cast<std::size_t>(dim) + 6] = kInfinity;
    x[static_cast<std::size_t>(dim) * 4] = -kInfinity;
    x[static_cast<std::size_t>(dim) * 5] = 1e6f;
  }
  return x;
}

kvarn::tokens_view<const float> view(const std::vector<float>& x, int dim) {
  return {x.data(), dim, 1};
}

kvarn::query_factor make_factor(int dim, std::uint64_t seed) {
  kvarn::query_moment moment(dim);
  moment.add(view(vectors(48, dim, seed, flavour::outliers), dim), 48);
  return kvarn::query_factor(moment);
}

// False once a target differs from the scalar one.
bool targets_agree = true;

// What f(target) gives on the scalar target, after the same on all others that this machine has.
template <class F>
auto on_every_target(const std::string& name, const F& f) {
  const auto expected = f(kvarn::target::scalar);
  for (const kvarn::target_info& info : kvarn::target_infos)
    if (info.id != kvarn::target::scalar && kvarn::is_available(info.id) &&
        !(f(info.id) == expected)) {
      std::printf("%s differs on %s\n", name.c_str(), std::string(info.name).c_str());
      targets_agree = false;
    }
  return expected;
}

template <class T>
void add_decoded(digest& out, kvarn::const_tile_view tile, bool rotate_back, kvarn::target on) {
  std::vector<T> decoded(static_cast<std::size_t>(tile.layout.group) *
                         static_cast<std::size_t>(tile.layout.head_dim));
  kvarn::decode_tile(tile, kvarn::tokens_view<T>{decoded.data(), tile.layout.head_dim, 1},
                     rotate_back, on);
  out.add(decoded);
}

// Of the records of every flavour, and of what they decode to.
struct encoded_digests {
  digest bytes;
  digest numbers;
  friend bool operator==(const encoded_digests&, const encoded_digests&) = default;
};

encoded_digests encoded(const kvarn::encoder_recipe& recipe, const kvarn::tile_layout& layout,
                        const kvarn::query_factor* factor, kvarn::target on) {
  encoded_digests out;
  std::vector<float> workspace(kvarn::encode_workspace(layout));
  std::vector<std::byte> record(layout.record_bytes());
  for (int i = 0; i < flavours; ++i) {
    const auto x = vectors(layout.group, layout.head_dim, static_cast<std::uint64_t>(100 + i),
                           static_cast<flavour>(i));
    const kvarn::tile_view tile{record.data(), layout};
    const kvarn::encode_report report = kvarn::encode_tile(
        view(x, layout.head_dim), tile, recipe, i % 4 != 3, factor, workspace.data(), on);
    out.bytes.add(record);
    out.bytes.add(static_cast<std::uint64_t>(report.replaced.nan), 4);
    out.bytes.add(static_cast<std::uint64_t>(report.replaced.saturated), 4);
    out.bytes.add(report.normalize.imbalance);
    switch (i % 4) {
      case 0:
        add_decoded<float>(out.numbers, tile, true, on);
        break;
      case 1:
        add_decoded<kvarn::float16>(out.numbers, tile, true, on);
        break;
      case 2:
        add_decoded<kvarn::bfloat16>(out.numbers, tile, true, on);
        break;
      default:
        add_decoded<float>(out.numbers, tile, false, on);
        break;
    }
  }
  return out;
}

void print_encoded(const std::string& method, const kvarn::encoder_recipe& recipe,
                   const kvarn::tile_layout& layout, const kvarn::query_factor* factor) {
  const std::string name =
      "encode." + method + (layout.kind == kvarn::tile_kind::key ? ".key" : ".value") + ".D" +
      std::to_string(layout.head_dim) + ".G" + std::to_string(layout.group) + ".b" +
      std::to_string(layout.bits) + (layout.scale == kvarn::scale_type::ue5m3 ? ".ue5m3" : ".e4m3");
  const encoded_digests digests =
      on_every_target(name, [&](kvarn::target on) { return encoded(recipe, layout, factor, on); });
  digests.bytes.print(name);
  digests.numbers.print("de" + name.substr(2));
}

void print_encoders(int dim, int group, int bits, kvarn::scale_type scale) {
  const kvarn::query_factor factor = make_factor(dim, 7);
  for (const auto kind : {kvarn::tile_kind::key, kvarn::tile_kind::value}) {
    const kvarn::tile_layout layout{kind, dim, group, bits, scale};
    for (const auto& [method, name] : kvarn::encoder_infos)
      // Of values, query_aware is tuned.
      if (kind == kvarn::tile_kind::key || method != kvarn::encoder::query_aware)
        print_encoded(name, kvarn::recipe_of(method, kind, bits), layout, &factor);
    // Of the steps that no encoder takes, here is one recipe.
    print_encoded("equivariant",
                  {.scaling = kvarn::row_scaling::dual_axis_equivariant,
                   .iterations = 2,
                   .range = 0.8f,
                   .refits = 2,
                   .unbiased = true},
                  layout, nullptr);
  }
}

// The numbers on the way to a record, of which records show few bits.
void print_steps() {
  for (const int dim : kvarn::supported_head_dims) {
    auto x = vectors(8, dim, 11, flavour::ordinary);
    kvarn::hadamard(x.data(), dim, 8, dim);
    digest bits;
    bits.add(x);
    bits.print("hadamard.D" + std::to_string(dim));
  }

  const auto moment_of = [](kvarn::target on) {
    kvarn::query_moment moment(80);
    moment.add(view(vectors(48, 80, 12, flavour::outliers), 80), 48, true, on);
    return moment;
  };
  on_every_target("moment", [&](kvarn::target on) {
    digest sums;
    for (const float x : moment_of(on).sums()) sums.add(x);
    return sums;
  }).print("moment");
  on_every_target("factor", [&](kvarn::target on) {
    const kvarn::query_factor factor(moment_of(on), kvarn::query_factor::default_damping, on);
    digest upper;
    for (int i = 0; i < 80 * 80; ++i) upper.add(factor.upper()[i]);
    return upper;
  }).print("factor");

  constexpr int rows = 32, cols = 80;
  std::vector<float> row_scale(rows), col_scale(cols);
  std::vector<float> workspace(kvarn::normalize_workspace(rows, cols));
  for (const bool equivariant : {false, true}) {
    digest scales;
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      const auto x = vectors(rows, cols, seed, seed % 2 == 0 ? flavour::outliers : flavour::offset);
      kvarn::variance_normalize(x.data(), rows, cols, 0.375f,
                                {.iterations = 6, .scale_equivariant = equivariant},
                                row_scale.data(), col_scale.data(), workspace.data());
      scales.add(row_scale);
      scales.add(col_scale);
    }
    scales.print(equivariant ? "normalize.equivariant" : "normalize.paper");
  }

  // A last bit that differs survives the rounding to binary16 once in some thousand columns.
  constexpr int columns = 1 << 14;
  std::vector<float> inverse_scale, weight;
  for (int r = 0; r < rows; ++r) {
    inverse_scale.push_back(1.0f / static_cast<float>(17 + r));
    weight.push_back(static_cast<float>(100 + 3 * r));
  }
  digest fitted, refitted, unbiased;
  const auto add = [](digest& out, const kvarn::column_grid& grid) {
    out.add(grid.zero);
    out.add(grid.step);
  };
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const auto x = vectors(rows, columns, seed, flavour::ordinary);
    const kvarn::scaled_tile tile{x.data(), inverse_scale.data(), rows, columns};
    for (int c = 0; c < columns; ++c) {
      const auto grid = kvarn::fit_range(tile, c, 0.7f, c % 2 == 0, 3, kvarn::scale_type::ue5m3);
      add(fitted, grid);
      const auto better = kvarn::refit(tile, c, grid, 3, weight.data(), kvarn::scale_type::ue5m3);
      add(refitted, better);
      add(unbiased, kvarn::unbias(tile, c, better, 3, kvarn::scale_type::ue5m3));
    }
  }
  fitted.print("fit_range");
  refitted.print("refit");
  unbiased.print("unbias");

  digest powers, logarithms;
  for (int i = -130 * 1024; i <= 128 * 1024; ++i)
    powers.add(kvarn::exp2_of(static_cast<float>(i) * 0x1p-10f));
  for (int i = 1; i < 1 << 18; ++i)
    logarithms.add(kvarn::log_of(static_cast<float>(i), static_cast<float>(i % 64) * 0.37f));
  powers.print("exp2");
  logarithms.print("log");
}

struct attention_case {
  const char* name;
  kvarn::attention_options options;
};

// Attention over a sink of 40 tokens, ten groups (two chunks) of which the last but one is cut, and
// a tail of 150, from 2 query tokens of 2 heads.
template <class T>
void print_attention(const char* type, const kvarn::cache_format& format) {
  constexpr int sink = 40, groups = 10, cut = 2, tail = 150, tokens = 2, heads = 2;
  const int key_dim = format.key_head_dim;
  const int value_dim = format.value_head_dim;

  std::vector<std::vector<std::byte>> records;
  const auto encode = [&](const kvarn::tile_layout& layout, std::uint64_t seed, flavour kind) {
    std::vector<float> workspace(kvarn::encode_workspace(layout));
    records.emplace_back(layout.record_bytes());
    kvarn::encode_tile(view(vectors(layout.group, layout.head_dim, seed, kind), layout.head_dim),
                       kvarn::tile_view{records.back().data(), layout}, kvarn::encode_options{},
                       workspace.data());
    return records.back().data();
  };
  std::vector<kvarn::sealed_group> sealed;
  std::int64_t position = sink;
  for (int i = 0; i < groups; ++i) {
    const auto seed = static_cast<std::uint64_t>(200 + 2 * i);
    const int count = i == cut ? format.group / 2 + 3 : format.group;
    const std::byte* keys = encode(format.key_layout(), seed, flavour::ordinary);
    const std::byte* values =
        encode(format.value_layout(), seed + 1, i % 3 == 1 ? flavour::outliers : flavour::ordinary);
    sealed.push_back({keys, values, position, count});
    position += count;
  }

  const auto exact = [&](int count, int dim, std::uint64_t seed) {
    std::vector<T> stored;
    for (const float x : vectors(count, dim, seed, flavour::ordinary))
      stored.push_back(static_cast<T>(x));
    return stored;
  };
  const auto sink_keys = exact(sink, key_dim, 301), sink_values = exact(sink, value_dim, 302);
  const auto tail_keys = exact(tail, key_dim, 303), tail_values = exact(tail, value_dim, 304);
  const kvarn::attention_memory<T> memory{
      format,
      {{sink_keys.data(), key_dim, 1}, {sink_values.data(), value_dim, 1}, 0, sink},
      sealed,
      {{tail_keys.data(), key_dim, 1}, {tail_values.data(), value_dim, 1}, position, tail}};

  const auto q = exact(tokens * heads, key_dim, 305);
  const kvarn::attention_queries<T> queries{
      {q.data(), key_dim, 1}, tokens, heads, position + tail - tokens};

  const float scale = kvarn::hadamard_norm(key_dim);
  const float sink_logits[heads] = {0.75f, -3.0f};
  using precision = kvarn::operand_precision;
  const attention_case cases[] = {
      {"int16", {.softmax_scale = scale}},
      {"int8", {.softmax_scale = scale, .precision = precision::int8}},
      {"sharp", {.softmax_scale = 8 * scale}},
      {"soft_cap", {.softmax_scale = scale, .logit_soft_cap = 2.5f}},
      {"window", {.softmax_scale = scale, .window = tail + 3 * format.group / 2}},
      {"sink_logit", {.softmax_scale = scale, .sink_logits = sink_logits}},
      {"rotated", {.softmax_scale = scale, .queries_rotated = true, .rotate_output = false}},
      {"all",
       {.softmax_scale = scale,
        .logit_soft_cap = 2.5f,
        .window = tail + 3 * format.group / 2,
        .sink_logits = sink_logits,
        .precision = precision::int8,
        .queries_rotated = true,
        .rotate_output = false}},
  };
  std::vector<float> workspace(kvarn::attention_workspace(format));
  for (const attention_case& c : cases) {
    // The bits of one target.
    const auto attended = [&](kvarn::target on) {
      std::vector<T> out(static_cast<std::size_t>(tokens * heads * value_dim));
      std::vector<float> lse(tokens * heads);
      kvarn::attend(queries, memory, c.options, kvarn::tokens_view<T>{out.data(), value_dim, 1},
                    lse.data(), workspace.data(), on);
      digest bits;
      bits.add(out);
      bits.add(lse);
      return bits;
    };
    const std::string name = "attend." + std::string(c.name) + ".K" + std::to_string(key_dim) +
                             "x" + std::to_string(format.key_bits) + ".V" +
                             std::to_string(value_dim) + "x" + std::to_string(format.value_bits) +
                             ".G" + std::to_string(format.group) + "." + type;
    on_every_target(name, attended).print(name);
  }
}

}  // namespace

int main() {
  using kvarn::scale_type;
  print_steps();
  for (const int bits : kvarn::supported_bits)
    for (const auto scale : {scale_type::ue5m3, scale_type::e4m3}) {
      print_encoders(64, 128, bits, scale);
      print_encoders(80, 64, bits, scale);
    }
  print_encoders(96, 128, 2, scale_type::ue5m3);
  print_encoders(112, 64, 3, scale_type::e4m3);
  print_encoders(128, 128, 4, scale_type::ue5m3);
  print_encoders(160, 64, 2, scale_type::e4m3);
  print_encoders(256, 128, 3, scale_type::ue5m3);
  print_attention<float>("float", {});
  print_attention<kvarn::float16>("float16", {64, 64, 128, 2, 3, scale_type::e4m3});
  print_attention<kvarn::bfloat16>("bfloat16", {192, 128, 64, 4, 2, scale_type::ue5m3});
  print_attention<float>("float", {80, 112, 64, 3, 4, scale_type::ue5m3});
  return targets_agree ? 0 : 1;
}
