package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"headgate/internal/agent/policy"
	"headgate/internal/fault"
)

// madeByInit is the first line of a file that init may replace; a file without
// it belongs to a person.
const madeByInit = "# Made by headgate-agent policy init. Remove this line to keep your changes.\n"

func newPolicy() *cobra.Command {
	cmd := &cobra.Command{Use: "policy", Short: "Check or make a policy file", Args: noArgs}
	cmd.AddCommand(newPolicyCheck(), newPolicyInit())
	return cmd
}

func newPolicyCheck() *cobra.Command {
	return &cobra.Command{
		Use: "check FILE", Short: "Say whether a policy file is acceptable and what it allows", Args: oneArg("policy file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := policy.Load(args[0])
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if p.Kinds == nil {
				fmt.Fprintln(out, "kinds: all")
			} else {
				fmt.Fprintln(out, "kinds:", strings.Join(p.Kinds, ", "))
			}
			for _, name := range p.Names() {
				prog := p.Programs[name]
				fmt.Fprintf(out, "program %s: %s\n", name, strings.Join(append([]string{prog.Path}, prog.Args...), " "))
				if err := prog.CheckFile(); err != nil {
					fmt.Fprintln(cmd.ErrOrStderr(), "warning:", err)
				}
			}
			return nil
		},
	}
}

func newPolicyInit() *cobra.Command {
	var dir, appendFile string
	cmd := &cobra.Command{
		Use: "init --dir DIR", Short: "Write a policy for trying things out: all kinds and a few harmless programs", Args: noArgs,
		Long: "Writes DIR/policy.yaml and prints its path. A file that init has made before is replaced, any other is kept.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if dir == "" {
				return usage(fmt.Errorf("--dir is missing"))
			}
			path, err := initPolicy(dir, appendFile)
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), path)
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory for policy.yaml")
	cmd.Flags().StringVar(&appendFile, "append-file", "", "file that the program append-id writes to (default DIR/appended-ids)")
	return cmd
}

func initPolicy(dir, appendFile string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	if appendFile == "" {
		appendFile = filepath.Join(dir, "appended-ids")
	}
	if appendFile, err = filepath.Abs(appendFile); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "policy.yaml")
	old, err := os.ReadFile(path)
	if err == nil && !strings.HasPrefix(string(old), madeByInit) {
		return path, nil
	}
	self, err := os.Executable()
	if err != nil {
		return "", fault.Wrap(err, fault.Internal, "policy_not_made", "The path of this program cannot be found out.")
	}
	if self, err = filepath.EvalSymlinks(self); err != nil {
		return "", fault.Wrap(err, fault.Internal, "policy_not_made", "The path of this program cannot be found out.")
	}
	data, err := policy.Development(self, appendFile)
	if err != nil {
		return "", err
	}
	return path, replaceFile(path, append([]byte(madeByInit), data...))
}

// replaceFile puts a whole new file in the place of an old one.
func replaceFile(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fault.Wrap(err, fault.Internal, "policy_not_made", "The directory of "+path+" cannot be made.")
	}
	tmp := path + ".new"
	err := os.WriteFile(tmp, data, 0o600)
	if err == nil {
		err = os.Chmod(tmp, 0o600)
	}
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		return fault.Wrap(err, fault.Internal, "policy_not_made", "The file "+path+" cannot be written.")
	}
	return nil
}
