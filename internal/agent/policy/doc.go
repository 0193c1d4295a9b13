// Package policy provides what the owner of a machine allows an agent to do:
// the kinds of tasks, and the programs that cmd.run may start with the shape
// of their parameters. The controller can never widen it; it does not run
// anything itself.
//
// A policy is a YAML file. Unknown keys are errors, and the file must belong to
// root or to the agent's own user and be writable by nobody else.
//
//	version: 1
//	kinds: [core.ping, core.inventory, cmd.run]   # absent: all
//	programs:
//	  tail-log:
//	    path: /usr/bin/tail
//	    description: Show the last lines of one of the logs.
//	    args: ["-n", "{lines}", "/var/log/{log}.log"]
//	    params:
//	      lines: {type: int, min: 1, max: 10000, default: "100"}
//	      log: {type: enum, values: [kea, named], required: true}
//	    user: nobody            # only when the agent runs as root
//	    group: nogroup          # the same; instead of the user's own
//	    groups: [adm]           # the same; instead of the user's further ones
//	    cwd: /
//	    umask: "022"
//	    env: {TZ: UTC}
//	    timeout: 10s
//	    grace: 5s               # between SIGTERM and SIGKILL
//	    leave_children: false   # what it leaves behind is ended with it
//	    success_codes: [0]
//	    max_output_bytes: 1048576
//
// A value fills one element of the argument list or a part of it, never more
// than one, and no shell ever sees it. An element that mentions a parameter
// without a value and without a default is left out. "{{" and "}}" stand for
// braces.
package policy
