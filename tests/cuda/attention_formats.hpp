// The formats that attention is compiled for in the tests: every bit width on both sides, both
// groups, both FP8 types, head dimensions of every kind. More of them, and nvcc takes minutes.
#pragma once

#include <iterator>

#include "cuda/launch.hpp"
#include "kvarn/format/tile_layout.hpp"

namespace kvarn_test {

inline constexpr kvarn::cache_format attention_formats[] = {
    {128, 128, 128, 2, 2, kvarn::scale_type::ue5m3},  //
    {128, 128, 128, 4, 2, kvarn::scale_type::e4m3},   //
    {64, 64, 128, 2, 2, kvarn::scale_type::ue5m3},    //
    {80, 112, 64, 3, 3, kvarn::scale_type::e4m3},     //
    {96, 128, 128, 2, 3, kvarn::scale_type::ue5m3},   //
    {192, 128, 128, 2, 4, kvarn::scale_type::ue5m3},  //
    {256, 256, 128, 2, 2, kvarn::scale_type::ue5m3},  //
    {128, 128, 128, 4, 4, kvarn::scale_type::ue5m3},  //
    {256, 256, 128, 4, 4, kvarn::scale_type::ue5m3},  // four warps
};
inline constexpr int attention_format_count = static_cast<int>(std::size(attention_formats));

struct attention_functions {
  kvarn::cuda::launch_status (*launch)(const kvarn::cuda::attention_arguments&, cudaStream_t);
  std::size_t (*workspace_bytes)(const kvarn::cuda::attention_arguments&);
  // The same with blocks of four rows, however many there are.
  kvarn::cuda::launch_status (*launch_by_fours)(const kvarn::cuda::attention_arguments&,
                                                cudaStream_t);
  std::size_t (*workspace_bytes_by_fours)(const kvarn::cuda::attention_arguments&);
  int (*local_bytes)(bool has_more_rows);  // see attention_of.cuh
};

// Of attention_formats[Index].
template <int Index>
attention_functions attention_of();

}  // namespace kvarn_test
