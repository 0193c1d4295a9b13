package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

func TestStatusShowsTheListenerAndWhatFails(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	err := printStatus(cmd, json.RawMessage(`{"phase":"serving","ready":false,"version":{"version":"1"},
		"unmet":[{"condition":"database","detail":"failed 3 times"},{"condition":"public_port","detail":"is reclosed"}],
		"ports":{"controller":["127.0.0.1:7441"],"public":["0.0.0.0:7440"],"public_open":false,"state":"reclosed","reason":"unstable for 40 s"},
		"database":{"reachable":true,"notes":["process 7 of report has held a snapshot for 2m0s"]},
		"checks":[{"name":"database","ok":false,"since":"2026-01-02T03:04:05Z","detail":"failed 3 times"},{"name":"memory","ok":true,"since":"2026-01-02T03:04:05Z","detail":"no limit is set"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"reclosed: unstable for 40 s", "0.0.0.0:7440, refuses", "failed check", "database since", "waits for", "public_port: is reclosed", "process 7 of report"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "memory") || strings.Count(out.String(), "failed 3 times") != 1 {
		t.Errorf("too much:\n%s", &out)
	}
}

func TestStatusOfAKilledUpSaysSo(t *testing.T) {
	t.Parallel()
	child := exec.Command("true")
	if err := child.Run(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	err := explainNoAnswer(runFile{ControllerURL: "https://127.0.0.1:1", PID: child.Process.Pid}, dir, errNoSuchPort{})
	for _, want := range []string{filepath.Join(dir, runFileName), "is gone", "`headgate up`"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in %q", want, err)
		}
	}
	err = explainNoAnswer(runFile{ControllerURL: "https://127.0.0.1:1", PID: child.Process.Pid}, dir, &problem{Status: 503, Code: "starting"})
	if strings.Contains(err.Error(), "gone") {
		t.Errorf("it answered: %q", err)
	}
}

type errNoSuchPort struct{}

func (errNoSuchPort) Error() string { return "connection refused" }

func TestStatusOfAnOpenPortSaysWhatAFailedCheckLeadsTo(t *testing.T) {
	t.Parallel()
	var a answer
	a.Ports.State, a.Ports.Reason = "open", "the database answers"
	if got := a.because(); got != "the database answers" {
		t.Errorf("without a failed check: %q", got)
	}
	a.Checks = []check{{Name: "memory", OK: true}, {Name: "database"}}
	if got := a.because(); !strings.Contains(got, "for now") {
		t.Errorf("with a failed check: %q", got)
	}
}

// statusOf runs `headgate status` as far as it finds out whom to ask.
func statusOf(t *testing.T, args ...string) (runFile, error) {
	t.Helper()
	cmd := newStatusCommand()
	if err := cmd.Flags().Parse(args); err != nil {
		t.Fatal(err)
	}
	file, _ := cmd.Flags().GetString("config")
	dir, _ := cmd.Flags().GetString("data")
	return locate(cmd, file, dir)
}

func TestStatusFindsAControllerByItsSettings(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	says := func(err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want something with %q", err, want)
		}
	}
	_, err := statusOf(t, "--data", dir)
	says(err, "no controller has run")
	put("controller-id", "x")
	_, err = statusOf(t, "--data", dir)
	says(err, "curl -sk https://127.0.0.1:7441/readyz")
	ca := put("ca.pem", "x")
	_, err = statusOf(t, "--data", dir)
	says(err, "--admin-token-file")
	first := put("admin-token", "x")
	got, err := statusOf(t, "--data", dir, "--controller-addr", ":7999")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(runFile{ControllerURL: "https://127.0.0.1:7999", CAFile: ca, TokenFile: first}, got); diff != "" {
		t.Errorf("by the directory (-want +got):\n%s", diff)
	}
	other := put("elsewhere", "x")
	config := put("headgate.yaml", "data: "+dir+"\npublic_addr: 127.0.0.1:7440\ncontroller_addr: '[::]:7998'\nadmin_token_file: "+other+"\ndatabase_url: postgres://db/headgate?sslmode=verify-full\n")
	if got, err = statusOf(t, "--config", config); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(runFile{ControllerURL: "https://127.0.0.1:7998", CAFile: ca, TokenFile: other}, got); diff != "" {
		t.Errorf("by the file (-want +got):\n%s", diff)
	}
	_, err = statusOf(t, "--data", dir, "--controller-addr", "127.0.0.1:0")
	says(err, "names no address and port")
}

func TestTheEnvironmentWinsOverThePresetsOfUp(t *testing.T) {
	t.Setenv("HEADGATE_LOG_LEVEL", "debug")
	cmd := newUpCommand()
	if err := cmd.Flags().Parse([]string{"--data", t.TempDir(), "--drain-timeout", "7s"}); err != nil {
		t.Fatal(err)
	}
	cfg, err := upConfig(cmd, &upOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if cfg.LogLevel != "debug" || cfg.DrainTimeout != 7*time.Second || cfg.PublicAddr != "127.0.0.1:7440" {
		t.Errorf("level %q, drain %v, public %q", cfg.LogLevel, cfg.DrainTimeout, cfg.PublicAddr)
	}
}

// The certificate of a controller with one port bears the names that the
// public uses, not the address that status asks at.
func TestAServersCertificateStandsForThatServerAlone(t *testing.T) {
	t.Parallel()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("t"), 0o600); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{}") }))
	defer server.Close()
	for name, want := range map[string]bool{"its own": true, "another": false} {
		leaf := server.Certificate().Raw
		if !want {
			key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"example.com"}}
			if leaf, err = x509.CreateCertificate(rand.Reader, template, template, key.Public(), key); err != nil {
				t.Fatal(err)
			}
		}
		file := filepath.Join(t.TempDir(), "public.crt")
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf}), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := newClient(server.URL, file, token)
		if err != nil {
			t.Fatal(err)
		}
		err = c.call(t.Context(), http.MethodGet, "/", nil, nil)
		c.http.CloseIdleConnections()
		if (err == nil) != want {
			t.Errorf("%s certificate: %v", name, err)
		}
	}
}
