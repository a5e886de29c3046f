#!/usr/bin/env bash
# Run the command that is given, and pass SIGTERM on to it. Where that ended it early, exit with 143 in place of 0:
# training saves and leaves in peace, and a launcher that saw 0 would take it for done and not start it again.
stopped=0
"$@" & child=$!
trap 'stopped=143; kill -TERM "$child" 2>/dev/null' TERM
trap : INT  # a terminal sends it to both
# A trap ends `wait`, but not the command.
while wait "$child"; status=$?; kill -0 "$child" 2>/dev/null; do :; done
[ "$status" -ne 0 ] || status=$stopped
exit "$status"
