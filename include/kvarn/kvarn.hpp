// The whole library for a CPU.
#pragma once

#include "attention/attend.hpp"
#include "attention/merge.hpp"
#include "attention/softmax.hpp"
#include "attention/tile_product.hpp"
#include "codec/encoder.hpp"
#include "codec/hadamard.hpp"
#include "codec/tile_codec.hpp"
#include "codec/tokens.hpp"
#include "codec/variance_normalize.hpp"
#include "config.hpp"
#include "error.hpp"
#include "format/float16.hpp"
#include "format/float8.hpp"
#include "format/tile_layout.hpp"
#include "format/tile_view.hpp"
#include "simd/target.hpp"
