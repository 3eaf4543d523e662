// The method for a CPU: encoding, decoding, attention. Apart from it: the cache
// (cache/kv_cache.hpp), whose tables and locks would add a third to the time of compilation, and
// its files (cache/cache_file.hpp), which need streams.
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
