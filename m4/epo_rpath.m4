# SPDX-License-Identifier: Apache-2.0
# EPO_RPATH: programs find our library without a path of their own where the loader looks
# anyway; elsewhere by a path relative to themselves, so that an installed tree can move.
# Never by an absolute one, which libtool would write.
AC_DEFUN([EPO_RPATH], [
AC_MSG_CHECKING([how programs find the library])
EPO_RPATH_FLAGS=
epo_libdir=$libdir epo_prefix=$prefix epo_exec=$exec_prefix
AS_IF([test "x$epo_prefix" = xNONE], [epo_prefix=$ac_default_prefix])
AS_IF([test "x$epo_exec" = xNONE], [epo_exec='${prefix}'])
while :; do # ${exec_prefix}/lib, ${prefix}/lib, /usr/local/lib
    epo_next=`echo "$epo_libdir" | sed "s|\\${exec_prefix}|$epo_exec|; s|\\${prefix}|$epo_prefix|"`
    AS_IF([test "x$epo_next" = "x$epo_libdir"], [break])
    epo_libdir=$epo_next
done
AS_CASE([" $sys_lib_dlsearch_path_spec /lib /lib64 /usr/lib /usr/lib64 "],
    [*" $epo_libdir "*], [epo_how="as the loader does"],
    [AS_CASE(["$bindir|$libdir"],
        ['${exec_prefix}/bin|${exec_prefix}/'*],
        [epo_below=`echo "$libdir" | sed 's|^@<:@^/@:>@*/||'`
         EPO_RPATH_FLAGS="-Wl,-rpath,'\$\$ORIGIN/../$epo_below'"
         epo_how="beside themselves, ../$epo_below"],
        [epo_how="by ldconfig or LD_LIBRARY_PATH"])])
AC_MSG_RESULT([$epo_how])
AC_SUBST([EPO_RPATH_FLAGS])
hardcode_libdir_flag_spec= # of libtool, which config.status will write
])
