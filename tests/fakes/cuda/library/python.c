/* The way to Python, which computes: an operation of torch is a number that Python knows (operations.py), a kernel of
 * Triton a handle with the bytes of its arguments (triton_kernels.py). A stream calls with the GIL; the host lets go of
 * the GIL where it waits for a stream. */
#include "stand_in.h"
#include <dlfcn.h>

static void (*compute)(long number, int is_captured, int device);
static void (*compute_kernel)(void *kernel, unsigned x, unsigned y, unsigned z, char *arguments, int device);
static int (*holds_gil)(void);
static void *(*save_thread)(void);
static void (*restore_thread)(void *);

int is_over;
/* NULL for both at the end of the interpreter: of what is still issued nothing is done any more. A copy that ran behind an
 * operation that was left out would hand on what other memory had. */
EXPORT void stand_in_set_python(void (*operations)(long, int, int), void (*kernels)(void *, unsigned, unsigned, unsigned, char *, int)) {
    holds_gil = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    save_thread = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    restore_thread = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    compute_kernel = kernels;
    compute = operations;
    is_over = !operations;
}
void *release_gil(void) { return compute && holds_gil() ? save_thread() : NULL; }
void take_gil(void *released) {
    if (released) restore_thread(released);
}

static void run_operation(Operation *self, int device) {
    long number;
    memcpy(&number, self->data, sizeof number);
    if (compute) compute(number, self->is_captured, device);
}
/* Issues an operation of torch. Returns the error that a launch on this device answers. */
EXPORT int stand_in_issue(int device, void *stream, long number) {
    int before = current_device;
    current_device = device;  /* the default stream is that of the current device */
    cudaError_t error = enter(__func__);
    count(OPERATIONS);
    if (!error) put(stream_of((cudaStream_t)stream), operation(run_operation, &number, sizeof number));
    current_device = before;
    return error;
}
EXPORT void stand_in_wait(int device, void *stream) {
    int before = current_device;
    count(HOST_WAITS);
    current_device = device;
    enter(__func__);
    wait_for(stream_of((cudaStream_t)stream));
    current_device = before;
}

/* -- kernels of Triton ------------------------------------------------------------------------------------------------ */

enum { MOST_ARGUMENTS = 32 };
typedef struct Described { void *kernel; int number; int sizes[MOST_ARGUMENTS]; struct Described *next; } Described;
static Described *described;

EXPORT void stand_in_describe(void *kernel, int number, const int *sizes) {
    Described *new = calloc(1, sizeof *new);
    new->kernel = kernel;
    new->number = number < MOST_ARGUMENTS ? number : MOST_ARGUMENTS;
    memcpy(new->sizes, sizes, new->number * sizeof *sizes);
    new->next = described;
    described = new;
}

static Described *description_of(void *kernel) {
    Described *found = described;
    while (found && found->kernel != kernel) found = found->next;
    return found;
}
/* The bytes of a parameter; 0 if the kernel has none of this number. */
int described_size(void *kernel, size_t index) {
    Described *found = description_of(kernel);
    return found && index < (size_t)found->number ? found->sizes[index] : 0;
}

typedef struct Launch { void *kernel; unsigned grid[3]; char arguments[8 * MOST_ARGUMENTS]; } Launch;

static void run_kernel(Operation *self, int device) {
    Launch launch;
    memcpy(&launch, self->data, sizeof launch);
    if (compute_kernel) compute_kernel(launch.kernel, launch.grid[0], launch.grid[1], launch.grid[2], launch.arguments, device);
}
/* 0 if nobody has described the kernel. */
int launch_described(const char *name, void *kernel, Stream *stream, const unsigned grid[3], void **arguments) {
    Described *found = description_of(kernel);
    if (!found) return 0;
    Launch launch = {kernel, {grid[0], grid[1], grid[2]}, {0}};
    for (int place = 0; place < found->number; place++) memcpy(launch.arguments + 8 * place, arguments[place], found->sizes[place]);
    trace("launch of %s with %u programs", name, grid[0]);
    put(stream, operation(run_kernel, &launch, sizeof launch));
    return 1;
}
