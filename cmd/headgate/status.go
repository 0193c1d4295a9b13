package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
)

func newStatusCommand() *cobra.Command {
	var dir string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show how the controller on this machine stands, over its controller port",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			abs, err := filepath.Abs(dir)
			if err != nil {
				return err
			}
			r, err := readRunFile(abs)
			if err != nil {
				return err
			}
			c, err := newClient(r.ControllerURL, r.CAFile, r.TokenFile)
			if err != nil {
				return err
			}
			var raw json.RawMessage
			if err := c.call(cmd.Context(), "GET", "/api/v1/status", nil, &raw); err != nil {
				return explainNoAnswer(r, abs, err)
			}
			if asJSON {
				fmt.Fprintln(cmd.OutOrStdout(), string(raw))
				return nil
			}
			return printStatus(cmd, raw)
		},
	}
	cmd.Flags().StringVar(&dir, "data", "./.headgate", "state directory of `headgate up`")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the API's answer as it is")
	return cmd
}

// explainNoAnswer says why the controller may not have answered. Its process is
// looked for only then: it may run where this one cannot see it.
func explainNoAnswer(r runFile, dir string, err error) error {
	if _, answered := errors.AsType[*problem](err); answered {
		return fmt.Errorf("ask the controller at %s: %w", r.ControllerURL, err)
	}
	if r.PID > 0 && errors.Is(syscall.Kill(r.PID, 0), syscall.ESRCH) {
		return fmt.Errorf("%s is of a start that has ended: its process %d is gone, so it was killed or the machine was restarted. "+
			"`headgate up` with the same directory continues (%w)", filepath.Join(dir, runFileName), r.PID, err)
	}
	return fmt.Errorf("the controller at %s does not answer, though its process %d is there: %w", r.ControllerURL, r.PID, err)
}

// answer is the part of GET /api/v1/status that people read.
type answer struct {
	Phase string `json:"phase"`
	Ready bool   `json:"ready"`
	Unmet []struct {
		Condition string `json:"condition"`
		Detail    string `json:"detail"`
	} `json:"unmet"`
	Version struct {
		Version string `json:"version"`
	} `json:"version"`
	Ports struct {
		Controller []string `json:"controller"`
		Public     []string `json:"public"`
		PublicOpen bool     `json:"public_open"`
		State      string   `json:"state"`
		Reason     string   `json:"reason"`
	} `json:"ports"`
	Checks []struct {
		Name   string    `json:"name"`
		OK     bool      `json:"ok"`
		Since  time.Time `json:"since"`
		Detail string    `json:"detail"`
	} `json:"checks"`
}

func printStatus(cmd *cobra.Command, raw json.RawMessage) error {
	var s answer
	if err := json.Unmarshal(raw, &s); err != nil {
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "version\t%s\nphase\t%s\nready\t%t\n", s.Version.Version, s.Phase, s.Ready)
	open := "refuses"
	if s.Ports.PublicOpen {
		open = "accepts"
	}
	fmt.Fprintf(w, "listener\t%s: %s\n", s.Ports.State, s.Ports.Reason)
	fmt.Fprintf(w, "controller port\t%s\n", strings.Join(s.Ports.Controller, ", "))
	fmt.Fprintf(w, "public port\t%s, %s\n", strings.Join(s.Ports.Public, ", "), open)
	shown := map[string]bool{}
	for _, c := range s.Checks {
		if !c.OK {
			shown[c.Name] = true
			fmt.Fprintf(w, "failed check\t%s since %s: %s\n", c.Name, c.Since.Local().Format(time.DateTime), c.Detail)
		}
	}
	for _, u := range s.Unmet {
		if !shown[u.Condition] {
			fmt.Fprintf(w, "waits for\t%s: %s\n", u.Condition, u.Detail)
		}
	}
	return w.Flush()
}
