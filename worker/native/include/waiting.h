/* What waits on a device. Functions return 0 with an exception set, where nothing else is said. */

#ifndef GPUWATCH_WAITING_H
#define GPUWATCH_WAITING_H

#include "rows.h"

/* The rows of a frame that lie on a device. Weights come last: if something else of the frame is non-finite, a weight is
   read that would keep its earlier numbers. */
typedef struct {
    Row *rows[MOST_ROWS];
    int64_t elements[MOST_ROWS]; /* of each: see `elements_in_order`; 0 for a weight that was read before */
    int used, values, fresh;     /* of these are no weights; were not read before */
} Asked;

/* What a frame is read with. The objects are owned. */
typedef struct {
    PyObject *buffer, *driver, *stream, *fresh, *known; /* DeviceStatsBuffer, StatsDevice, StreamBuffer, lists */
    PyObject *handle;                                   /* of the stream, as an integer */
} Reading;

/* Have items wait as WaitingTensors, in a list of the stream: weights for the packing of the rows, others for the next launch. */
int have_wait(FrameWriter *self, const Reading *reading, PyObject *list, PyObject *items, int64_t first, PyObject *count);

/* Note the weights of a frame whose rows begin at a position. Returns the rows of those that are fresh, or NULL with an
   exception set. */
PyObject *note_weights(FrameWriter *self, const Reading *reading, const Asked *asked, int64_t position, PyObject *count);

/* A tensor that waits may be changed by the script before it is read. */
int hold(FrameWriter *self, const Reading *reading, const Row *row, int64_t position);

#endif
