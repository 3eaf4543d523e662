// The target without vector instructions: the definitions themselves.
#if defined(KVARN_TARGET)
KVARN_TARGET(scalar, ANY, true)
#else

namespace kvarn {
inline namespace KVARN_ISA_NAMESPACE {
namespace scalar {

using kvarn::hadamard;
using kvarn::hadamard_unnormalized;
using kvarn::normalize_workspace;
using kvarn::variance_normalize;

namespace here = scalar;
#include "kernels.inl"

}  // namespace scalar
}  // namespace KVARN_ISA_NAMESPACE
}  // namespace kvarn
#endif
