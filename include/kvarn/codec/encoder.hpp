// The encoders: which steps each one takes. All write the same records, every decoder reads all.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "../config.hpp"
#include "../error.hpp"
#include "../format/tile_layout.hpp"

namespace kvarn {

enum class encoder : std::uint8_t {
  paper,        // KVarN as published: 8 iterations of dual-axis normalisation, min/max per column
  tuned,        // the default: the best that a tile alone allows
  query_aware,  // keys rounded with error feedback under the second moment of the queries
};

struct encoder_info {
  encoder id;
  const char* name;
};

// All encoders, in the order of their numbers.
inline constexpr encoder_info encoder_infos[] = {
    {encoder::paper, "paper"},
    {encoder::tuned, "tuned"},
    {encoder::query_aware, "query_aware"},
};

// What divides the rows of a tile.
enum class row_scaling : std::uint8_t {
  rms,                   // the root mean square of the row
  rms_equalized,         // the same, of the tile whose columns are divided by theirs
  dual_axis,             // variance_normalize, as the paper's code
  dual_axis_equivariant  // variance_normalize, measured against the tile's deviation
};

// The steps of an encoder for one kind of tile, in the order in which they are made. To add an
// encoder, add a name to both lists above and a row to recipe_of. Not together: choose_scales and
// unbiased.
struct encoder_recipe {
  row_scaling scaling = row_scaling::rms;
  int iterations = 0;           // of variance_normalize
  float range = 1.0f;           // the part of a column's minimum to maximum that its codes cover
  bool cover = true;            // zeros rounded down and steps reaching from there (fit_range)
  int refits = 0;               // least-squares rounds of step and zero
  bool unbiased = false;        // step corrected so that stored values are unbiased
  bool choose_scales = false;   // row scales among three FP8 neighbours by the row's error
  float along = 0.0f;           // how much more the error along the row counts there
  bool error_feedback = false;  // needs a query_factor

  friend constexpr bool operator==(const encoder_recipe&, const encoder_recipe&) = default;
};

// Why these numbers: docs/method.md.
KVARN_INLINE constexpr encoder_recipe recipe_of(encoder method, tile_kind kind, int bits) {
  if (method == encoder::paper)
    return {.scaling = row_scaling::dual_axis, .iterations = 8, .range = 1.0f, .cover = false};
  if (kind == tile_kind::value)
    return {.scaling = row_scaling::rms_equalized,
            .range = bits == 2   ? 0.8f
                     : bits == 3 ? 0.9f
                                 : 0.95f,
            .refits = 1,
            .unbiased = true};
  const bool feedback = method == encoder::query_aware;
  const float narrow = bits == 2 ? (feedback ? 0.8f : 0.75f) : (feedback ? 0.95f : 0.9f);
  return {.range = bits == 4 ? 1.0f : narrow,
          .choose_scales = !feedback,
          .along = feedback ? 0.0f : 8.0f,
          .error_feedback = feedback};
}

inline namespace KVARN_ISA_NAMESPACE {

// Whether there is an encoder of this number; recipe_of does not ask.
KVARN_COLD status validate(encoder method) {
  std::string message;
  append_parts(message, {"encoder is ", static_cast<int>(method), "; allowed are"});
  for (const encoder_info& info : encoder_infos) {
    if (info.id == method) return {};
    append_parts(message, {" ", static_cast<int>(info.id), " (", info.name, ")"});
  }
  return {error_code::invalid_argument, std::move(message)};
}

}  // namespace KVARN_ISA_NAMESPACE

}  // namespace kvarn
