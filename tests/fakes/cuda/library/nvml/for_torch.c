/* What torch asks NVML where memory has run out: not supported, which it takes as an answer. The rest of the library is
 * the stand-in for NVML that the tests of gpu_health have. */
#define EXPORT __attribute__((visibility("default")))
enum { NOT_SUPPORTED = 3 };

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *number, void *processes) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *info) { return NOT_SUPPORTED; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
