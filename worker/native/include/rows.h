/* The rows of one frame, before it is stored. worker/record/rows.py says what a row is.

   A frame is made in four steps, and each of them may give it up, which has then written and remembered nothing:
   gather (what each row is about, and what is known of it), read (the numbers of those that are new), number (where
   their values will stand), remember (what the next frame is to know). */

#ifndef GPUWATCH_ROWS_H
#define GPUWATCH_ROWS_H

#include "frame_writer.h"

enum { MOST_ROWS = 32, NO_ROW = -1 };

typedef struct {
    uint32_t slot, shape;
    int64_t value; /* its index in the page */
    uint8_t dtype, kind;
    uint16_t mark;
    int to_read, has_value; /* its numbers are to be read here; they are to be written here */
    int on_device;          /* its numbers are to be had from the device's reader, which writes them */
    int is_new, is_weight;  /* first seen in this page: to be remembered */
    int is_known_new;       /* `known` is not what FrameWriter.weights holds */
    int is_output;
    int same;               /* the earlier row about the same elements, or NO_ROW */
    int64_t version, low, high, meta;
    TensorView view;
    void *address;                                 /* NULL if it is not to be found again by its memory */
    PyObject *role, *object, *key, *seen, *place, *known; /* the tensor, and what is remembered of it */
} Row;

typedef struct {
    Row rows[MOST_ROWS];
    int used;
    int64_t at, page, batch, value_base, frames, row_count, values;
} Frame;

void clear_frame(Frame *frame);

/* The in-place changes of a tensor that is exactly a Tensor or a Parameter; 0 for an inference tensor, with no exception
   set. It calls torch's getter of `_version` directly: the lookup of the attribute takes as long as the getter. */
int version_of(FrameWriter *self, PyObject *tensor, int64_t *version);

/* Gather. Each is 0 if there is a row that is not an ordinary one. `slots`: role -> slot of the module. `depth`: how deep in
   the arguments or in what was returned. */
int leaf_rows(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *leaf, int depth, int is_output);
int weight_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *name, PyObject *weight, int64_t step);
int gradient_row(FrameWriter *self, Frame *frame, PyObject *slots, PyObject *role, PyObject *gradient, int mark);

/* Read and number; 0 if there is something in it that the Python path has to see. May release the lock, and calls Python
   for what lies on a device. `step`: optimizer steps so far, which is how old the numbers of a weight may be. */
int read_rows(FrameWriter *self, Frame *frame, int64_t step);

/* Make all that is to be remembered; 0 if that fails. Then, when the frame is stored, put it in its place. */
int make_memories(FrameWriter *self, Frame *frame, int64_t step);
void remember(FrameWriter *self, Frame *frame);

/* A TensorStats of Python (core's `numbers`); NULL with an exception set. */
PyObject *stats_of(PyTypeObject *type, int64_t low, int64_t high, int64_t meta, int64_t kind);

#endif
