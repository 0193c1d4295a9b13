package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"headgate/internal/agent/policy"
)

// newAppendID is the program of the development policy that leaves one line
// for each of its runs, by which a second run would show.
func newAppendID() *cobra.Command {
	return &cobra.Command{
		Use: policy.AppendName + " FILE", Short: "Append HEADGATE_TASK_ID and a newline to a file", Args: oneArg("file"), Hidden: true,
		RunE: func(_ *cobra.Command, args []string) error {
			id, ok := os.LookupEnv("HEADGATE_TASK_ID")
			if !ok {
				return errors.New("HEADGATE_TASK_ID is not set")
			}
			f, err := os.OpenFile(args[0], os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
			if err != nil {
				return err
			}
			// One write, so that lines of parallel runs do not mix.
			if _, err := fmt.Fprintf(f, "%s\n", id); err != nil {
				return errors.Join(err, f.Close())
			}
			return f.Close()
		},
	}
}
