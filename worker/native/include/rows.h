/* The rows of one frame, before it is stored. worker/record/rows.py says what a row is.

   A frame is made in four steps: gather (the tensor of each row, and its earlier reading), read (the numbers of new
   tensors), number (the index of each value), remember (what the next frames need). Each step may give up: then nothing is
   remembered, and Python writes the frame. */

#ifndef GPUWATCH_ROWS_H
#define GPUWATCH_ROWS_H

#include "reductions.h"
#include "writer_state.h"

enum { MOST_ROWS = 32, NO_ROW = -1 };

typedef struct {
    uint32_t slot, shape;
    int64_t value; /* its index in the page */
    uint8_t dtype, kind;
    uint16_t mark;
    int to_read, has_value; /* this code reads its numbers; it writes them */
    int on_device;          /* the device's reader reads and writes its numbers */
    int is_new, is_weight;  /* is_new: first seen in this page, so it is remembered */
    int is_known_new;       /* `known` is not what FrameWriter.weights holds */
    int is_output;
    int same;               /* the earlier row about the same elements, or NO_ROW */
    int64_t version;
    Numbers numbers;
    TensorView view;
    void *address;                                 /* NULL if views of the same memory are not looked for */
    /* The tensor, and its earlier reading. The row owns a reference to each: its numbers are read, and its hook is put in, after
       calls in which the script may drop the tensor, or another thread may replace an entry of the dictionaries. */
    PyObject *role, *object, *key, *seen, *place, *known;
} Row;

typedef struct {
    Row rows[MOST_ROWS];
    int used;
    int may_wait; /* a tensor on a device: its numbers may be read together with others' (device_rows.c) */
    int64_t seq; /* collectives issued so far */
    int64_t at, page, batch, value_base, frames, row_count, values;
} Frame;

void clear_frame(Frame *frame);

enum { NO_VERSION = -1 };

/* The in-place changes of a tensor that is exactly a Tensor or a Parameter; NO_VERSION for one of inference mode. 0 if torch does
   not tell, with no exception set. It calls torch's getter of `_version` directly: the lookup of the attribute takes as long as
   the getter. A getter of another class could be a function of the script's, and a subclass could hide it behind
   __torch_function__: hence exactly. */
int version_of(FrameWriter *self, PyObject *tensor, int64_t *version);

/* Gather. Each returns 0 if a row is not an ordinary one. `slots`: role -> slot of the module. `depth`: levels of nesting
   around the leaf in the arguments or in the output. */
int leaf_rows(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *leaf, int depth, int is_output);
int weight_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *name, PyObject *weight, int64_t step);
int gradient_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *gradient, int mark);

/* Make the objects to remember; 0 if that fails. `remember` puts them into the dictionaries after the frame was stored. */
int make_memories(FrameWriter *self, Frame *frame, int64_t step);
void remember(FrameWriter *self, Frame *frame);

/* (ref, version, step, numbers) of a weight; NULL with an exception set. Takes over `numbers`, which may be NULL. */
PyObject *known_of(const Row *row, PyObject *ref, int64_t step, PyObject *numbers);

/* A TensorStats of Python (core's `numbers`); NULL with an exception set. */
PyObject *stats_of(PyTypeObject *type, const Numbers *numbers, int64_t kind);

#endif
