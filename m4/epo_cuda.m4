# SPDX-License-Identifier: Apache-2.0
# EPO_CUDA: the CUDA Toolkit (12.4 or newer), for the CUDA engine.
# Sets NVCC, CUDAHOSTCXX, CUDA_CPPFLAGS, CUDA_LIBS, CUDA_GENCODE; conditional HAVE_CUDA.
AC_DEFUN([EPO_CUDA], [
  AC_ARG_WITH([cuda], [AS_HELP_STRING([--with-cuda@<:@=DIR@:>@], [CUDA Toolkit, for the CUDA engine @<:@off@:>@])],
    [], [with_cuda=no])
  AC_ARG_WITH([cuda-arch], [AS_HELP_STRING([--with-cuda-arch=LIST], [GPU architectures to compile for, e.g. "80 90a" @<:@80 89 90a, and 100 where nvcc has it@:>@])],
    [], [with_cuda_arch=default])
  AC_ARG_VAR([NVCC], [CUDA compiler])
  AC_ARG_VAR([NVCCFLAGS], [CUDA compiler flags])
  AC_ARG_VAR([CUDAHOSTCXX], [C++ compiler that nvcc uses for host code])
  have_cuda=no
  AS_IF([test "x$with_cuda" != xno], [
    EPO_CUDA_FIND
    EPO_CUDA_VERSION
    EPO_CUDA_HOST_COMPILER
    EPO_CUDA_LIBRARIES
    EPO_CUDA_ARCH
    EPO_CUDA_TRY
    have_cuda="$epo_cuda_version"
  ])
  AC_SUBST([CUDA_CPPFLAGS])
  AC_SUBST([CUDA_LIBS])
  AC_SUBST([CUDA_GENCODE])
  AM_CONDITIONAL([HAVE_CUDA], [test "$have_cuda" != no])
])

# nvcc: --with-cuda=DIR, $NVCC, $CUDA_HOME, PATH, /usr/local/cuda. cuda_home is what nvcc itself
# takes for the Toolkit's folder (it may be a wrapper that lies elsewhere).
AC_DEFUN([EPO_CUDA_FIND], [
  AS_IF([test "x$with_cuda" != xyes], [NVCC=$with_cuda/bin/nvcc],
    [test -z "$NVCC" && test -n "$CUDA_HOME"], [NVCC=$CUDA_HOME/bin/nvcc])
  AS_IF([test -z "$NVCC"], [AC_PATH_PROG([NVCC], [nvcc], [/usr/local/cuda/bin/nvcc], [$PATH:/usr/local/cuda/bin])])
  AS_IF([$NVCC --version >/dev/null 2>&1], [],
    [AC_MSG_ERROR([no CUDA compiler at $NVCC; give the Toolkit's folder as --with-cuda=DIR, or leave --with-cuda out])])
  cuda_home=`$NVCC --dryrun -c -o /dev/null none.cu 2>&1 | sed -n 's/^#\$ TOP=//p'`
  AS_IF([test -n "$cuda_home"], [cuda_home=`cd "$cuda_home" && pwd -P`], [cuda_home=/usr])
])

AC_DEFUN([EPO_CUDA_VERSION], [
  AC_MSG_CHECKING([for the version of $NVCC])
  epo_cuda_version=`$NVCC --version | sed -n 's/^.*release \(@<:@0-9@:>@*\.@<:@0-9@:>@*\).*$/\1/p'`
  AC_MSG_RESULT([$epo_cuda_version])
  AS_VERSION_COMPARE([$epo_cuda_version], [12.4],
    [AC_MSG_ERROR([CUDA 12.4 or newer is needed, $NVCC is of $epo_cuda_version])])
])

AC_DEFUN([EPO_CUDA_HOST_COMPILER], [
  AS_IF([test -z "$CUDAHOSTCXX"], [AC_PATH_PROG([CUDAHOSTCXX], [g++], [], [/usr/bin:$PATH])])
  AS_IF([test -z "$CUDAHOSTCXX"],
    [AC_MSG_ERROR([nvcc needs a C++ compiler for host code; Debian and Ubuntu: g++, RPM: gcc-c++, or CUDAHOSTCXX=...])])
])

# The runtime is linked statically where it can be: the engine must open in a process that has
# another CUDA runtime, or none. Neither variant brings libstdc++ along.
AC_DEFUN([EPO_CUDA_LIBRARIES], [
  AS_CASE([$cuda_home], [/usr|/usr/lib/*], [CUDA_CPPFLAGS= cuda_home=/usr], [CUDA_CPPFLAGS="-isystem $cuda_home/include"])
  epo_cuda_libdir=
  for epo_dir in "$cuda_home/lib64" "$cuda_home/targets/$host_cpu-linux/lib" "$cuda_home/targets/sbsa-linux/lib" "$cuda_home/lib/$host_cpu-linux-gnu" "$cuda_home/lib"; do
    AS_IF([test -z "$epo_cuda_libdir" && { test -e "$epo_dir/libcudart_static.a" || test -e "$epo_dir/libcudart.so"; }],
      [epo_cuda_libdir=$epo_dir])
  done
  AS_IF([test -z "$epo_cuda_libdir"],
    [AC_MSG_ERROR([neither libcudart_static.a nor libcudart.so was found under $cuda_home; is the Toolkit installed in full?])])
  AS_IF([test -e "$epo_cuda_libdir/libcudart_static.a"],
    [CUDA_LIBS="-L$epo_cuda_libdir -lcudart_static -ldl -lrt -lpthread"],
    [CUDA_LIBS="-L$epo_cuda_libdir -lcudart"])
  epo_save=$CPPFLAGS; CPPFLAGS="$CPPFLAGS $CUDA_CPPFLAGS"
  AC_CHECK_HEADERS([cuda.h cuda_runtime_api.h cublas_v2.h cublasLt.h], [],
    [AC_MSG_ERROR([a header of the CUDA Toolkit is missing under $cuda_home/include; is the Toolkit installed in full?])])
  CPPFLAGS=$epo_save
])

# Machine code for each architecture, and PTX of the last portable one for GPUs to come.
AC_DEFUN([EPO_CUDA_ARCH], [
  epo_archs=$with_cuda_arch
  AS_IF([test "x$epo_archs" = xdefault], [
    epo_archs="80 89 90a"
    AS_VERSION_COMPARE([$epo_cuda_version], [12.8], [], [epo_archs="$epo_archs 100"], [epo_archs="$epo_archs 100"])
  ])
  CUDA_GENCODE=
  epo_ptx=
  for epo_arch in $epo_archs; do
    AS_CASE([$epo_arch], [@<:@1-9@:>@@<:@0-9@:>@*], [],
      [AC_MSG_ERROR([--with-cuda-arch takes numbers such as "80 90a", not "$epo_arch"])])
    CUDA_GENCODE="$CUDA_GENCODE -gencode=arch=compute_$epo_arch,code=sm_$epo_arch"
    AS_CASE([$epo_arch], [*@<:@a-z@:>@], [], [epo_ptx=$epo_arch])
  done
  AS_IF([test -n "$epo_ptx"], [CUDA_GENCODE="$CUDA_GENCODE -gencode=arch=compute_$epo_ptx,code=compute_$epo_ptx"])
])

AC_DEFUN([EPO_CUDA_TRY], [
  AC_MSG_CHECKING([whether nvcc with $CUDAHOSTCXX compiles for $epo_archs])
  mkdir -p conftest.dir
  echo 'extern "C" __global__ void epo_try(int *p) { *p = threadIdx.x; }' >conftest.dir/try.cu
  AS_IF([$NVCC -ccbin "$CUDAHOSTCXX" -std=c++17 $CUDA_GENCODE $NVCCFLAGS -Xcompiler -fPIC -c -o conftest.dir/try.o conftest.dir/try.cu >conftest.dir/out 2>&1],
    [AC_MSG_RESULT([yes])],
    [AC_MSG_RESULT([no])
     cat conftest.dir/out >&AS_MESSAGE_LOG_FD
     epo_out=`tail -n 1 conftest.dir/out`
     AC_MSG_ERROR([nvcc failed: $epo_out (CUDAHOSTCXX=, --with-cuda-arch= and NVCCFLAGS= change what it does; config.log has it all)])])
  rm -rf conftest.dir
])
