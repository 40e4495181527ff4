// Lets tensors claim to be on a CUDA device in a build of torch without CUDA: switching the device
// does nothing. Registered when the library is loaded.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
