/* Devices that say they are H100s, and the contexts of this process on them. */
#include "stand_in.h"
#include <dlfcn.h>

static unsigned long contexts;
static const char uuids[2] = {0x00, 0x11}; /* these, names and buses are as the stand-in for NVML has them */
enum { FIRST_BUS = 0x1b };

int device_count(void) {
    long number = setting("STAND_IN_CUDA_DEVICES", 2);
    return number < 0 ? 0 : number > MOST_DEVICES ? MOST_DEVICES : (int)number;
}
int has_context(int device) { return __atomic_load_n(&contexts, __ATOMIC_SEQ_CST) >> device & 1; }
void make_context(int device) { __atomic_or_fetch(&contexts, 1ul << device, __ATOMIC_SEQ_CST); }
EXPORT unsigned long stand_in_contexts(void) { return __atomic_load_n(&contexts, __ATOMIC_SEQ_CST); }

EXPORT cudaError_t cudaGetDeviceCount(int *number) {
    *number = device_count();
    return *number ? 0 : failed(cudaErrorNoDevice);
}
EXPORT cudaError_t cudaGetDevice(int *device) { *device = current_device; return 0; }
EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return failed(cudaErrorInvalidDevice);
    current_device = device;
    ENTER();
    return 0;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }

static void set_uuid(char *bytes, int device) {
    static const unsigned char middle[6] = {0xaa, 0xaa, 0xbb, 0xbb, 0xcc, 0xcc};
    memset(bytes, device < 2 ? uuids[device] : device, 16);
    memcpy(bytes + 4, middle, sizeof middle);
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "NVIDIA H100 80GB HBM3");
    set_uuid(properties->uuid.bytes, device);
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->totalGlobalMem = (size_t)setting("STAND_IN_CUDA_MEMORY_MIB", 4096) << 20;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = 232448;
    properties->sharedMemPerMultiprocessor = 233472;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 0x7fffffff;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->l2CacheSize = 50 << 20;
    properties->unifiedAddressing = properties->concurrentManagedAccess = 1;
    properties->pciBusID = FIRST_BUS + device;
    return 0;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
        case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
        default: *value = 0;
    }
    return 0;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return 0; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return 0; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", FIRST_BUS + device);
    return 0;
}
EXPORT cudaError_t cudaProfilerStart(void) { return 0; }
EXPORT cudaError_t cudaProfilerStop(void) { return 0; }

/* -- the driver's API ------------------------------------------------------------------------------------------------ */

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(device + 1); }

EXPORT CUresult cuInit(unsigned flags) { return device_count() ? 0 : CUDA_ERROR_NO_DEVICE; }
EXPORT CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int index) { *device = index; return index < device_count() ? 0 : CUDA_ERROR_INVALID_DEVICE; }
EXPORT CUresult cuDeviceGetCount(int *number) { *number = device_count(); return 0; }
EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device) { snprintf(name, size, "NVIDIA H100 80GB HBM3"); return 0; }
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    set_uuid(uuid->bytes, device);
    return 0;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = has_context(device);
    return 0;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    make_context(device);
    *context = context_of(device);
    return 0;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) { *context = has_context(current_device) ? context_of(current_device) : NULL; return 0; }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { if (context) current_device = (int)(uintptr_t)context - 1; return 0; }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) { *device = current_device; return 0; }
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }

static CUresult not_there(void) { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) trace("%s of the driver: not there", name);
    if (!*function) *function = (void *)not_there;
    if (result) *result = 0;
    return 0;
}
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *function ? 0 : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? 0 : CUDA_ERROR_NOT_FOUND;
}
