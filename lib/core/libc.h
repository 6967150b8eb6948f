/* SPDX-License-Identifier: Apache-2.0
 *
 * libc.h - comes before every other header (the build includes it by itself).
 * From 2.38 on, glibc turns strtol, sscanf and their like into C23's, whose symbols
 * a container with an older libc lacks; what we preload must open there too.
 */
#ifndef EPO_CORE_LIBC_H
#define EPO_CORE_LIBC_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#include <features.h>
#undef _GNU_SOURCE /* files and config.h define it in their own way */
#else
#include <features.h>
#endif

#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0

#endif
