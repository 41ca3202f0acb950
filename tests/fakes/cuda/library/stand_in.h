/* What the files of the stand-in share. Device memory is host memory; a stream is a thread that runs late. */
#ifndef STAND_IN_H
#define STAND_IN_H
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_DEVICES 16

/* -- counters.c: what the device was asked to do ------------------------------------------------------------------- */

enum Counter {
    LAUNCHES,          /* kernels launched through the driver, as Triton does it */
    OPERATIONS,        /* operations of torch, one kernel each here */
    COPIES,            /* asynchronous copies */
    PAGEABLE_COPIES,   /* copies from or to host memory that the device cannot reach */
    FILLS,
    HOST_WAITS,        /* calls that waited, or would have waited, for the device */
    QUERIES,
    EVENTS,            /* events made */
    RECORDS,           /* events recorded */
    DEVICE_ALLOCATIONS,
    HOST_ALLOCATIONS,  /* pinned memory */
    REGISTRATIONS,
    COLLECTIVES,
    GRAPH_LAUNCHES,
    REFUSED,           /* calls that the stand-in cannot answer */
    COUNTERS
};
void count(enum Counter counter);

/* -- faults.c: what goes wrong on demand, and what a call answers once a device has failed -------------------------- */

extern __thread cudaError_t last_error;
extern __thread int current_device;
long setting(const char *name, long otherwise);
cudaError_t failed(cudaError_t error);            /* notes the error of this thread, and returns it */
cudaError_t enter(const char *call);              /* each call that needs a context: 0, or what it must return */
cudaError_t device_error(int device);             /* sticky */
void fail_device(int device, cudaError_t error, const char *why);
cudaError_t refuse(const char *call);             /* "the stand-in does not have it" */
int fault(const char *what, int rank);            /* whether STAND_IN_NCCL_FAULT asks for it here */
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define ENTER() do { cudaError_t wrong_ = enter(__func__); if (wrong_) return wrong_; } while (0)

/* -- devices.c ------------------------------------------------------------------------------------------------------ */

int device_count(void);
int has_context(int device);
void make_context(int device);

/* -- streams.c ------------------------------------------------------------------------------------------------------ */

typedef struct Operation Operation;
struct Operation {
    void (*run)(Operation *self, int device);  /* NULL: waits for `other` alone */
    struct Stream *other;
    long until;                                /* ... until it has done so many */
    int is_prompt;                             /* takes no time of its own */
    int is_captured;                           /* it belongs to a graph, which may run it again */
    Operation *next;
    size_t size;
    char data[];                               /* `size` bytes for `run` */
};

typedef struct Graph { Operation *first, *last; } Graph;

typedef struct Stream {
    int device, priority;
    unsigned flags;
    long issued, done;
    int is_started;
    Operation *head, *tail;
    Graph *capture;
    struct Stream *next;
} Stream;

Stream *stream_of(cudaStream_t handle);
Operation *operation(void (*run)(Operation *, int), const void *data, size_t size);
typedef struct Last { Stream *stream; long until; } Last;  /* the operation of a communicator that was issued last */
int put(Stream *stream, Operation *new);            /* 1 if a graph took it */
void put_behind(Stream *stream, Operation *new, Last *last[], int number);  /* and make it the last one of each */
void wait_for(Stream *stream);                      /* the host waits for all that was issued */
void wait_for_device(int device);
cudaError_t unsafe(const char *call);               /* what a capture forbids in this thread: 0, or the error */
int start_capture(Stream *stream);                  /* graphs.c */
Graph *end_capture(Stream *stream);
void put_graph(Stream *stream, Graph *graph);
#define UNSAFE() do { cudaError_t wrong_ = unsafe(__func__); if (wrong_) return wrong_; } while (0)

/* -- memory.c ------------------------------------------------------------------------------------------------------- */

int is_device_memory(const void *address, size_t size);
int is_reachable(const void *address, size_t size); /* host memory that the device may reach */

/* -- python.c: Python computes what torch and Triton launch --------------------------------------------------------- */

extern int is_over;           /* the interpreter has ended: streams do nothing any more */
void *release_gil(void);
void take_gil(void *released);
int launch_described(const char *name, void *kernel, Stream *stream, const unsigned grid[3], void **arguments);
int described_size(void *kernel, size_t index);
#endif
