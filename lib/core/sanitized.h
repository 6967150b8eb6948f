/* SPDX-License-Identifier: Apache-2.0
 *
 * sanitized.h - is this a build with the address or thread sanitizer?
 */
#ifndef EPO_CORE_SANITIZED_H
#define EPO_CORE_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define EPO_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define EPO_SANITIZED 1
#endif
#endif
#ifndef EPO_SANITIZED
#define EPO_SANITIZED 0
#endif

#endif
