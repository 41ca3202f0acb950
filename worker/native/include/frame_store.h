/* The open segment of the recorder: what is in it, and the stores of one frame. core/recorder/layout.py has the bytes. */

#ifndef GPUWATCH_FRAME_STORE_H
#define GPUWATCH_FRAME_STORE_H

#include "rows.h"

/* What a frame says beside its rows. */
typedef struct {
    int64_t module, parent, depth, phase, seq, collectives;
    int64_t rank_phase, rank_module; /* for the file's header: what the rank is doing, and where; -1: not said */
} Call;

/* What the open segment holds so far; 0 if there is none, or the recorder is closed. */
int begin_frame(FrameWriter *self, Frame *frame);

/* The same page's segment again, after its reader has put values into it; 0 if it is gone. */
int follow_segment(FrameWriter *self, Frame *frame);

/* The stores, values first: a reader goes by the counts. Goes on in another segment when one is full. 0, and no frame is
   stored, if somebody else has written since `begin_frame`: the lock may have been released in between. */
int store_frame(FrameWriter *self, Frame *frame, const Call *call);

#endif
