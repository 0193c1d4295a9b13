package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"text/tabwriter"

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
				return fmt.Errorf("ask the controller at %s: %w", r.ControllerURL, err)
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

func printStatus(cmd *cobra.Command, raw json.RawMessage) error {
	var s struct {
		Phase string `json:"phase"`
		Ready bool   `json:"ready"`
		Unmet []struct {
			Condition string `json:"condition"`
			Detail    string `json:"detail"`
		} `json:"unmet"`
		Version struct {
			Version string `json:"version"`
		} `json:"version"`
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return err
	}
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "version\t%s\nphase\t%s\nready\t%t\n", s.Version.Version, s.Phase, s.Ready)
	for _, u := range s.Unmet {
		fmt.Fprintf(w, "waits for\t%s: %s\n", u.Condition, u.Detail)
	}
	return w.Flush()
}
