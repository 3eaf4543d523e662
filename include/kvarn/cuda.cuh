// Everything for CUDA devices: kernels and their launchers, for files that nvcc compiles. What the
// launchers take is in cuda/arguments.hpp, which C++ files can include.
#pragma once

#include "cuda/arguments.hpp"
#include "cuda/attention.cuh"
#include "cuda/decode.cuh"
#include "cuda/encode.cuh"
#include "cuda/query_moments.cuh"
