/* Writes a frame into the open segment of the recorder. core/recorder/layout.py defines the bytes. */

#ifndef GPUWATCH_FRAME_STORE_H
#define GPUWATCH_FRAME_STORE_H

#include "rows.h"

/* The fields of a frame, without its rows. */
typedef struct {
    int64_t module, parent, depth, phase, collectives;
    int64_t rank_phase, rank_module; /* for the file's header: the activity of the rank, and its module; -1: no change */
} Call;

/* Begin a frame: read the counts of the open segment. 0 if no segment is open, the recorder is closed, or another thread is
   writing. Nothing is locked: `store_frame` finds out whether somebody wrote since. */
int begin_frame(FrameWriter *self, Frame *frame);

/* Read the counts again after a device's reader has added values. 0 if another page is open by then. */
int follow_segment(FrameWriter *self, Frame *frame);

/* RecorderWriter.values: take `count` values side by side, whose numbers are pending. Returns the position of the first in its
   segment, and its `index` in the page; -1 if that fails. */
int64_t take_values(FrameWriter *self, const Frame *frame, int count, int64_t *index);

/* Store the values, then the rows, then the frame. Each count is written after its entries, because readers of the file
   trust the counts. A full segment is continued in the next one. 0, and no frame is stored, if something else was written
   since `begin_frame`: the GIL may have been released in between. */
int store_frame(FrameWriter *self, Frame *frame, const Call *call);

#endif
