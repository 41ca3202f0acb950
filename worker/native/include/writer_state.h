/* The state of a FrameWriter, which all files that gather, read and store a frame share. */

#ifndef GPUWATCH_WRITER_STATE_H
#define GPUWATCH_WRITER_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "layout.h"
#include "tensor_view.h"

/* The dictionaries and callables that it shares with the Python path. */
#define EACH_OBJECT(DO)                                                                                       \
    DO(memory) DO(cursor) DO(seen) DO(by_memory) DO(weights) DO(shapes) DO(ignored) DO(watched)    \
    DO(local) DO(kwargs) DO(gradients) DO(progress) DO(issued) DO(numbers) DO(tensor) DO(parameter) DO(modes) \
    DO(compiler) DO(hook_dict) DO(handle) DO(leaves_of) DO(next_segment) DO(mutex) \
    DO(device_row) DO(waiting)
/* None, or what reads the tensors of a frame that are on a device:
   device_frame(tensors, elements, earlier, count) -> ([int | None, ...], [numbers | None, ...]). The last tensors, as many as
   `earlier`, are weights. `elements`: how many lie in one piece of a tensor's memory, in order; 0: not known. `earlier`: what
   the last call for this weight, version and step has returned for it, or None. `count`: also count zeros and subnormals.
   Returned are the index of each tensor's value, which is in the page by then, None if it cannot be measured; and the numbers
   of each weight. It is called with RecorderLock taken. And None, or the DeviceRows whose tensors device_reads.c reads. */
#define EACH_OPTIONAL(DO) DO(device_frame) DO(device_rows)

/* A shape, and its id in `shapes`. */
enum { RECENT_DIMS = 5, RECENT_SHAPES = 64 };
typedef struct {
    int64_t sizes[RECENT_DIMS];
    int is_used, ndim;
    uint32_t id;
} RecentShape;

#define AS_MEMBER(NAME) PyObject *NAME;
typedef struct {
    PyObject_HEAD
    EACH_OBJECT(AS_MEMBER)
    EACH_OPTIONAL(AS_MEMBER)
    int reads_host; /* 0: tensors in host memory are treated as if they were on a device */
    Py_buffer cell; /* of the cursor */
    const Exchange *exchange;
    int forward, with_weights, with_grads;
    int64_t near[FLOATS_END], largest[FLOATS_END];
    PyGetSetDescrObject *version;              /* Tensor._version */
    int64_t next_hook, hooks_end;              /* numbers of hooks that are taken from torch's count, and not used yet */
    RecentShape recent_shapes[RECENT_SHAPES]; /* by a hash of their sizes: a lookup in `shapes` needs a new tuple */
} FrameWriter;

/* Whether tensors may be read now: no mode of the script is active, which would see it, and nothing is being compiled. */
int may_look(FrameWriter *self);

/* Put the number of collectives issued so far into `seq`; 0 if it is not known. */
int issued_now(FrameWriter *self, int64_t *seq);

#endif
