/* Device memory (host memory, poisoned when it is new and when it is freed), pinned and registered memory, copies. */
#include "stand_in.h"
#include <sys/mman.h>

enum { NEW = 0xFF, FREED = 0x6B, QUARANTINE = 16 };  /* NEW: a nan of each float */

typedef struct Range { char *from; size_t size; int device, is_registered; struct Range *next; } Range;
static Range *blocks, *reachable;
static size_t used[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range freed[QUARANTINE];  /* what a late operation still touches is poison, not a crash */
static unsigned number_freed;

static Range *look(Range *list, const void *address, size_t size) {
    for (; list; list = list->next)
        if ((char *)address >= list->from && (char *)address + size <= list->from + list->size) return list;
    return NULL;
}
static int holds(Range **list, const void *address, size_t size, Range *found) {
    pthread_mutex_lock(&lock);
    Range *range = look(*list, address, size);
    if (range && found) *found = *range;
    pthread_mutex_unlock(&lock);
    return range != NULL;
}
int is_device_memory(const void *address, size_t size) { return holds(&blocks, address, size, NULL); }
int is_reachable(const void *address, size_t size) { return holds(&reachable, address, size, NULL); }

static void add(Range **list, void *from, size_t size, int is_registered) {
    Range *new = malloc(sizeof *new);
    *new = (Range){from, size, current_device, is_registered, NULL};
    pthread_mutex_lock(&lock);
    new->next = *list;
    *list = new;
    pthread_mutex_unlock(&lock);
}
static int take(Range **list, const void *from, Range *taken) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (; *list && !found; found ? 0 : (list = &(*list)->next, 0))
        if ((*list)->from == (char *)from) {
            Range *gone = *list;
            *taken = *gone;
            *list = gone->next;
            free(gone);
            found = 1;
        }
    pthread_mutex_unlock(&lock);
    return found;
}

EXPORT cudaError_t cudaMalloc(void **address, size_t size) {
    ENTER();
    UNSAFE();
    size_t most = (size_t)setting("STAND_IN_CUDA_MEMORY_MIB", 4096) << 20;
    count(DEVICE_ALLOCATIONS);
    if (!size) size = 1;
    if (__atomic_add_fetch(&used[current_device], size, __ATOMIC_SEQ_CST) > most) {
        __atomic_sub_fetch(&used[current_device], size, __ATOMIC_SEQ_CST);
        return failed(cudaErrorMemoryAllocation);
    }
    void *new = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (new == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    memset(new, NEW, size);
    add(&blocks, new, size, 0);
    *address = new;
    trace("cudaMalloc of %zu bytes on device %d", size, current_device);
    return 0;
}
EXPORT cudaError_t cudaFree(void *address) {
    Range block;
    ENTER();
    UNSAFE();
    if (!address) return 0;
    if (!holds(&blocks, address, 1, &block) || block.from != (char *)address) return failed(cudaErrorInvalidValue);
    wait_for_device(block.device);
    take(&blocks, address, &block);
    __atomic_sub_fetch(&used[block.device], block.size, __ATOMIC_SEQ_CST);
    memset(block.from, FREED, block.size);
    pthread_mutex_lock(&lock);
    Range *place = &freed[number_freed++ % QUARANTINE], old = *place;
    *place = block;
    pthread_mutex_unlock(&lock);
    if (old.from) munmap(old.from, old.size);
    return 0;
}
EXPORT cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    ENTER();
    *total = (size_t)setting("STAND_IN_CUDA_MEMORY_MIB", 4096) << 20;
    *unused = *total - used[current_device];
    return 0;
}

/* -- host memory ----------------------------------------------------------------------------------------------------- */

EXPORT cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
    ENTER();
    UNSAFE();
    count(HOST_ALLOCATIONS);
    if (posix_memalign(address, 4096, size ? size : 1)) return failed(cudaErrorMemoryAllocation);
    memset(*address, NEW, size);
    add(&reachable, *address, size, 0);
    return 0;
}
EXPORT cudaError_t cudaFreeHost(void *address) {
    Range range;
    ENTER();
    if (address && !take(&reachable, address, &range)) return failed(cudaErrorInvalidValue);
    free(address);
    return 0;
}
EXPORT cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    ENTER();
    count(REGISTRATIONS);
    if (setting("STAND_IN_CUDA_REFUSE_REGISTRATION", 0)) return failed(cudaErrorInvalidValue);
    if (is_reachable(address, 1)) return failed(cudaErrorHostMemoryAlreadyRegistered);
    add(&reachable, address, size, 1);
    trace("cudaHostRegister of %zu bytes, flags %u, on device %d", size, flags, current_device);
    return 0;
}
EXPORT cudaError_t cudaHostUnregister(void *address) {
    Range range;
    ENTER();
    return take(&reachable, address, &range) ? 0 : failed(cudaErrorHostMemoryNotRegistered);
}
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *address) {
    Range block;
    int on_device = holds(&blocks, address, 1, &block);
    memset(found, 0, sizeof *found);
    found->type = on_device ? cudaMemoryTypeDevice : is_reachable(address, 1) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->device = on_device ? block.device : current_device;
    if (found->type != cudaMemoryTypeUnregistered) found->devicePointer = (void *)address;
    if (found->type == cudaMemoryTypeHost) found->hostPointer = (void *)address;
    return 0;
}
EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (!is_device_memory((void *)address, 1) && !is_reachable((void *)address, 1)) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)value = address;
    else return CUDA_ERROR_NOT_SUPPORTED;
    return 0;
}

/* -- copies and fills ------------------------------------------------------------------------------------------------ */

typedef struct Copy { void *to; const void *from; size_t size; } Copy;  /* from NULL: the bytes lie behind it */
typedef struct Fill { void *to; int value; size_t size; } Fill;

static void run_copy(Operation *self, int device) {
    Copy copy;
    memcpy(&copy, self->data, sizeof copy);
    memmove(copy.to, copy.from ? copy.from : self->data + sizeof copy, copy.size);
}
static void run_fill(Operation *self, int device) {
    Fill fill;
    memcpy(&fill, self->data, sizeof fill);
    memset(fill.to, fill.value, fill.size);
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t handle) {
    ENTER();
    Stream *stream = stream_of(handle);
    int from_device = is_device_memory(from, size), to_device = is_device_memory(to, size);
    int staged = !from_device && !is_reachable(from, size), waits = !to_device && !is_reachable(to, size);
    count(COPIES);
    if (!size) return 0;
    if ((kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) && !from_device) return failed(cudaErrorInvalidValue);
    if ((kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) && !to_device) return failed(cudaErrorInvalidValue);
    if (staged || waits) {
        count(PAGEABLE_COPIES);
        if (stream->capture) return failed(cudaErrorStreamCaptureUnsupported);
    }
    Copy copy = {to, staged ? NULL : from, size};
    Operation *new = operation(run_copy, NULL, sizeof copy + (staged ? size : 0));
    memcpy(new->data, &copy, sizeof copy);
    if (staged) memcpy(new->data + sizeof copy, from, size);
    put(stream, new);
    if (waits) {
        trace("the host waits: a copy of %zu bytes into pageable memory", size);
        count(HOST_WAITS);
        wait_for(stream);
    }
    return failed(device_error(stream->device));
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    UNSAFE();
    cudaError_t error = cudaMemcpyAsync(to, from, size, kind, NULL);
    if (error) return error;
    count(HOST_WAITS);
    wait_for(stream_of(NULL));
    return failed(device_error(current_device));
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                                     enum cudaMemcpyKind kind, cudaStream_t stream) {
    cudaError_t error = 0;
    for (size_t row = 0; row < height && !error; row++)
        error = cudaMemcpyAsync((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream);
    return error;
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    ENTER();
    Fill fill = {to, value, size};
    if (size && !is_device_memory(to, size)) return failed(cudaErrorInvalidValue);
    count(FILLS);
    put(stream_of(stream), operation(run_fill, &fill, sizeof fill));
    return 0;
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }
