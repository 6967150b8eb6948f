/* SPDX-License-Identifier: Apache-2.0
 *
 * names.h - the names that plugin, library and tools share.
 */
#ifndef EPO_CORE_NAMES_H
#define EPO_CORE_NAMES_H

/* Inputs: a user's own defaults. */
#define EPO_IN_OVERLAP "SLURM_EP_OVERLAP"
#define EPO_IN_DISPATCHER "SLURM_EP_DISPATCHER"
#define EPO_IN_DELAY_WGRAD "SLURM_EP_DELAY_WGRAD"

/* Outputs: what the plugin tells the task.  Never read as an input by the plugin. */
#define EPO_OUT_DECISION "EP_OVERLAP_DECISION"     /* on | off */
#define EPO_OUT_REASON "EP_OVERLAP_REASON"         /* one line */
#define EPO_OUT_DISPATCHER "EP_OVERLAP_DISPATCHER" /* alltoall | flex */
#define EPO_OUT_FLEX_BACKEND                                                                       \
    "EP_OVERLAP_FLEX_BACKEND"                        /* deepep | hybridep | ncclep, if asked for */
#define EPO_OUT_DELAY_WGRAD "EP_OVERLAP_DELAY_WGRAD" /* 0 | 1 */
/* Which options somebody asked for: words of the configuration's keys, "auto" */
#define EPO_OUT_GIVEN "EP_OVERLAP_GIVEN"
/* For scripts that build a command line inside the task. */
#define EPO_OUT_MEGATRON_ARGS "EP_OVERLAP_MEGATRON_ARGS"       /* Megatron-LM's arguments */
#define EPO_OUT_BRIDGE_OVERRIDES "EP_OVERLAP_BRIDGE_OVERRIDES" /* Megatron-Bridge's */
/* For programs that call NCCL themselves; a user's own value is kept. */
#define EPO_OUT_INTERPOSE "EP_OVERLAP_INTERPOSE" /* off | observe | accelerate */
#define EPO_INTERPOSE_OFF "off"
#define EPO_INTERPOSE_OBSERVE "observe"
#define EPO_INTERPOSE_ACCELERATE "accelerate"
/* 1: record what they communicate (a user's own value may be a folder for a file per rank) */
#define EPO_OUT_RECORD "EP_OVERLAP_RECORD"
#define EPO_OUT_SET "EP_OVERLAP_SET" /* what was set and what stood there before */

/* From srun's plugin to the nodes' plugin: the step's decision.  Named SLURM_ so
 * that --export=NONE lets it pass; removed before the task starts. */
#define EPO_STEP_RECORD "SLURM_EP_OVERLAP_STEP"

/* The user's own knobs of the library, not touched by the plugin. */
#define EPO_ENV_CHUNKS "EP_OVERLAP_CHUNKS"             /* expert groups per pass */
#define EPO_ENV_CHUNKS_FILE "EP_OVERLAP_CHUNKS_FILE"   /* measured choices, kept */
#define EPO_ENV_TIMEOUT "EP_OVERLAP_TIMEOUT"           /* seconds */
#define EPO_ENV_NODES "EP_OVERLAP_NODES"               /* "0,0,1,1": each rank's, for tests */
#define EPO_ENV_NODES_APART "EP_OVERLAP_NODES_APART"   /* 1: as if on several machines */
#define EPO_ENV_HOST_LINK "EP_OVERLAP_HOST_LINK"       /* "GB/s,us": emulated link */
#define EPO_ENV_BLAS_THREADS "EP_OVERLAP_BLAS_THREADS" /* per rank, host engine */

/* When the recorder looks: steps "10-14" or seconds "60s-70s"; NCCL calls of one step, where
 * they do not tell by themselves. */
#define EPO_ENV_RECORD_WINDOW "EP_OVERLAP_RECORD_WINDOW"
#define EPO_ENV_RECORD_CALLS "EP_OVERLAP_RECORD_CALLS"
/* 1: CUPTI is taken out of the process after the window. */
#define EPO_ENV_RECORD_LEAVE "EP_OVERLAP_RECORD_LEAVE"
/* 1: exchanges by copy engines are marked on their streams, so that their waits count. */
#define EPO_ENV_RECORD_MARK "EP_OVERLAP_RECORD_MARK"

/* The interposer's least message, in bytes (k, m, g). */
#define EPO_ENV_INTERPOSE_LEAST "EP_OVERLAP_INTERPOSE_LEAST"
/* Microseconds for which a rank waits for another's CPU at most before a message is NCCL's. */
#define EPO_ENV_INTERPOSE_WAIT "EP_OVERLAP_INTERPOSE_WAIT"
/* 0: ncclAlltoAll is left to NCCL, only messages of ncclSend and ncclRecv are carried. */
#define EPO_ENV_INTERPOSE_ALLTOALL "EP_OVERLAP_INTERPOSE_ALLTOALL"

#endif
