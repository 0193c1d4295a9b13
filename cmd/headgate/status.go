package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"headgate/internal/controller"
)

func newStatusCommand() *cobra.Command {
	var file, dir string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show how the controller on this machine stands, over its controller port",
		Long: "Show how the controller on this machine stands, over its controller port, which answers also\n" +
			"while the public port is closed, or over its one port (--two-phase=false). Name the file of `headgate serve` by --config, or the state\n" +
			"directory by --data.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			abs, err := filepath.Abs(dir)
			if err != nil {
				return err
			}
			r, err := locate(cmd, file, abs)
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
	addConfigFile(cmd.Flags(), &file)
	cmd.Flags().StringVar(&dir, "data", "./.headgate", "state directory of the controller")
	cmd.Flags().String("controller-addr", controller.DefaultControllerAddr, "its controller port, if `headgate up` has not written it to the directory")
	cmd.Flags().String("public-addr", "127.0.0.1:7440", "its public port, likewise, if that is the only one")
	cmd.Flags().String("two-phase", "true", "false if its public port is the only one")
	cmd.Flags().Lookup("two-phase").NoOptDefVal = "true"
	cmd.Flags().String("admin-token-file", "", "its file with an API token, if it is not in the directory")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the API's answer as it is")
	return cmd
}

// locate says how to reach the controller: by the file that `headgate up`
// writes when all is running, and else by the settings of the controller.
func locate(cmd *cobra.Command, file, dir string) (runFile, error) {
	if file == "" {
		if r, err := readRunFile(dir); !errors.Is(err, os.ErrNotExist) {
			return r, err
		}
	}
	cfg, err := settingsOf(cmd, file, dir)
	if err != nil {
		return runFile{}, err
	}
	r := runFile{CAFile: filepath.Join(cfg.Data, "ca.pem"), TokenFile: cfg.AdminTokenFile}
	flag, at, scheme := "--controller-addr", cfg.ControllerAddr, "https"
	if !cfg.TwoPhase {
		flag, at = "--public-addr", cfg.PublicAddr
		if cfg.TLSCertFile == "" {
			scheme = "http"
		} else {
			r.CAFile = cfg.TLSCertFile
		}
	}
	addr, err := netip.ParseAddrPort(at)
	if host, port, _ := net.SplitHostPort(at); host == "" {
		addr, err = netip.ParseAddrPort("127.0.0.1:" + port)
	}
	if err != nil || addr.Port() == 0 {
		return r, &usageError{fmt.Errorf("%s: %q names no address and port to ask at", flag, at)}
	}
	if addr.Addr().IsUnspecified() {
		addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), addr.Port())
	}
	r.ControllerURL = scheme + "://" + addr.String()
	for _, name := range []string{upTokenFile, "admin-token"} {
		if _, err := os.Stat(filepath.Join(cfg.Data, name)); r.TokenFile == "" && err == nil {
			r.TokenFile = filepath.Join(cfg.Data, name)
		}
	}
	return r, r.complete(cfg.Data)
}

// complete says what is missing to ask a controller. Both files come with its
// first start.
func (r runFile) complete(dir string) error {
	if _, err := os.Stat(r.CAFile); err != nil {
		if _, err := os.Stat(filepath.Join(dir, "controller-id")); err != nil {
			return fmt.Errorf("no controller has run with the state directory %s; name another one by --data, or its settings by --config", dir)
		}
		return fmt.Errorf("%s is not there: the controller has not reached its database yet, for the first time. "+
			"What it waits for it says to anybody: curl -sk %s/readyz", r.CAFile, r.ControllerURL)
	}
	if r.TokenFile == "" {
		return fmt.Errorf("%s holds no API token; name the file with one by --admin-token-file", dir)
	}
	return nil
}

// settingsOf gives the settings of the controller as far as status needs them.
func settingsOf(cmd *cobra.Command, file, dir string) (controller.Config, error) {
	if file != "" {
		return configFrom(cmd, file, nil)
	}
	preset := upPreset(dir) // what it leaves out does not matter here
	delete(preset, "admin-token-file")
	cfg, err := configFrom(cmd, "", preset)
	cfg.Data = dir
	return cfg, err
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
	if r.PID == 0 {
		return fmt.Errorf("no controller answers at %s: it is not running, or has another controller_addr (%w)", r.ControllerURL, err)
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
	Database struct {
		Notes []string `json:"notes"`
	} `json:"database"`
	Checks []check `json:"checks"`
}

type check struct {
	Name   string    `json:"name"`
	OK     bool      `json:"ok"`
	Since  time.Time `json:"since"`
	Detail string    `json:"detail"`
}

// because says why the listener is in its state. What let it open is old news
// when a check fails now.
func (s answer) because() string {
	if s.Ports.State == "open" && slices.ContainsFunc(s.Checks, func(c check) bool { return !c.OK }) {
		return "for now; if a check goes on failing it lets in only those it knows, and later nobody"
	}
	return s.Ports.Reason
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
	listener := s.Ports.State
	if why := s.because(); why != "" {
		listener += ": " + why
	}
	fmt.Fprintf(w, "listener\t%s\n", listener)
	if len(s.Ports.Controller) > 0 {
		fmt.Fprintf(w, "controller port\t%s\n", strings.Join(s.Ports.Controller, ", "))
	}
	fmt.Fprintf(w, "public port\t%s, %s\n", strings.Join(s.Ports.Public, ", "), open)
	shown := map[string]bool{}
	for _, c := range s.Checks {
		if !c.OK {
			shown[c.Name] = true
			fmt.Fprintf(w, "failed check\t%s since %s: %s\n", c.Name, c.Since.Local().Format(time.DateTime), c.Detail)
		}
	}
	for _, n := range s.Database.Notes {
		fmt.Fprintf(w, "database\t%s\n", n)
	}
	for _, u := range s.Unmet {
		if !shown[u.Condition] {
			fmt.Fprintf(w, "waits for\t%s: %s\n", u.Condition, u.Detail)
		}
	}
	return w.Flush()
}
