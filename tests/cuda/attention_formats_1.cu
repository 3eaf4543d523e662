// Attention for formats 3 to 5 of the tests.
#include "cuda/attention_of.cuh"

namespace kvarn_test {

template attention_functions attention_of<3>();
template attention_functions attention_of<4>();
template attention_functions attention_of<5>();

}  // namespace kvarn_test
