// What kernels use, included before any target region: nothing here is compiled for a newer CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "../attention/attention.hpp"
#include "../attention/scalar_attention.hpp"
#include "../attention/softmax.hpp"
#include "../attention/tile_product.hpp"
#include "../codec/arithmetic.hpp"
#include "../codec/encoder.hpp"
#include "../codec/hadamard.hpp"
#include "../codec/query_sums.hpp"
#include "../codec/round_columns.hpp"
#include "../codec/scalar_codec.hpp"
#include "../codec/tokens.hpp"
#include "../codec/variance_normalize.hpp"
#include "../config.hpp"
#include "../format/float16.hpp"
#include "../format/float8.hpp"
#include "../format/tile_layout.hpp"
#include "../format/tile_view.hpp"
