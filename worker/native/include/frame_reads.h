/* The numbers of a frame's tensors: those in host memory are read here, those on a device by device_rows.c. */

#ifndef GPUWATCH_FRAME_READS_H
#define GPUWATCH_FRAME_READS_H

#include "rows.h"

/* Read and number; 0 if Python must write the frame. May release the GIL, and calls Python for tensors on a
   device. `step`: optimizer steps so far. The numbers of a weight are valid within one step. */
int read_rows(FrameWriter *self, Frame *frame, int64_t step);

#endif
