/* Starts to read the tensors of a frame that lie on a device. */

#ifndef GPUWATCH_DEVICE_READS_H
#define GPUWATCH_DEVICE_READS_H

#include "rows.h"

/* The rows of a frame that lie on a device. Weights come last: if something else of the frame is non-finite, a weight is
   read that would keep its earlier numbers. */
typedef struct {
    Row *rows[MOST_ROWS];
    int64_t elements[MOST_ROWS]; /* of each: see `elements_in_order`; 0 for a weight that was read before */
    int used, values, fresh;     /* of these are no weights; were not read before */
} Asked;

/* Start to read ordinary tensors and weights, all on one device. Their values lie side by side. `count`: see `device_frame`.
   Returns the index of the first, and in `rows` a list of the numbers of each weight that was not read before; -1 if
   `device_frame` must be asked, and nothing was done; -2 if it has failed. */
int64_t start_reads(FrameWriter *self, const Asked *asked, const Frame *frame, int count, PyObject **rows);

#endif
