/* Kernels: torch's own are known by name and are not to come here (operations.py computes torch's operations), Triton's
 * are loaded by the driver's API and described by Python. What nobody computes is refused, aloud. */
#include "stand_in.h"
#include <time.h>

/* -- torch's own: the runtime's registration ---------------------------------------------------------------------------- */

typedef struct Function { const void *host; char name[256]; struct Function *next; } Function;
enum { BUCKETS = 4096 };
static Function *functions[BUCKETS];
static unsigned bucket(const void *host) { return ((uintptr_t)host >> 4) % BUCKETS; }

EXPORT void **__cudaRegisterFatBinary(void *binary) { return calloc(1, 64); }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant, int global) {}
EXPORT char __cudaInitModule(void **handle) { return 0; }
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads, uint3 *a, uint3 *b, dim3 *c, dim3 *d, int *warp) {
    Function *new = malloc(sizeof *new);
    new->host = host;
    snprintf(new->name, sizeof new->name, "%s", name);
    new->next = functions[bucket(host)];
    functions[bucket(host)] = new;
}
static Function *function_of(const void *host) {
    Function *found = functions[bucket(host)];
    while (found && found->host != host) found = found->next;
    return found;
}

/* torch.cuda._sleep: a cycle is a nanosecond. */
static void run_sleep(Operation *self, int device) {
    int64_t cycles;
    memcpy(&cycles, self->data, sizeof cycles);
    struct timespec pause = {cycles / 1000000000, cycles % 1000000000};
    nanosleep(&pause, NULL);
}
static cudaError_t launch(Function *function, void **arguments, cudaStream_t stream) {
    ENTER();
    const char *name = function ? function->name : "a kernel without a name";
    if (strstr(name, "spin_kernel")) {
        count(OPERATIONS);
        put(stream_of(stream), operation(run_sleep, arguments[0], sizeof(int64_t)));
        return 0;
    }
    return refuse(name);
}
/* `kernel<<<grid, block>>>()` leaves its configuration here for the launch that follows. */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return 0;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) { *kernel = (cudaKernel_t)function_of(host); return 0; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch((Function *)kernel, arguments, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    return launch(function_of(host), arguments, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
    return launch(function_of(host), arguments, config->stream);
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *host) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return 0;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attribute, int value) { return 0; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int threads, size_t shared) { *blocks = 2; return 0; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int threads, size_t shared, unsigned flags) { *blocks = 2; return 0; }

/* -- functions of the host, in the order of a stream -------------------------------------------------------------------- */

typedef struct HostCall { cudaHostFn_t function; void *data; } HostCall;
static void run_host(Operation *self, int device) {
    HostCall call;
    memcpy(&call, self->data, sizeof call);
    call.function(call.data);
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    ENTER();
    HostCall call = {function, data};
    put(stream_of(stream), operation(run_host, &call, sizeof call));
    return 0;
}

/* -- the driver's modules ------------------------------------------------------------------------------------------------ */

typedef struct Kernel { char name[128]; } Kernel;

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)calloc(1, 8); return 0; }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned number, CUjit_option *options, void **values) {
    return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleUnload(CUmodule module) { return 0; }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    Kernel *new = calloc(1, sizeof *new);
    snprintf(new->name, sizeof new->name, "%s", name);
    *function = (CUfunction)new;
    return 0;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return 0;
}
EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    int found = described_size(function, index);
    *offset = 8 * index;
    *size = found;
    return found ? 0 : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return 0; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return 0; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int *number, CUfunction function, const CUlaunchConfig *config) { *number = 1; return 0; }

static CUresult launch_kernel(CUfunction function, const unsigned grid[3], CUstream stream, void **arguments) {
    cudaError_t wrong = enter("cuLaunchKernel");
    Kernel *kernel = (Kernel *)function;
    if (wrong) return (CUresult)wrong;
    count(LAUNCHES);
    if (launch_described(kernel->name, kernel, stream_of((cudaStream_t)stream), grid, arguments)) return 0;
    return (CUresult)refuse(kernel->name);
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                               CUstream stream, void **arguments, void **extra) {
    const unsigned grid[3] = {x, y, z};
    return launch_kernel(function, grid, stream, arguments);
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    return launch_kernel(function, grid, config->hStream, arguments);
}
