package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// client calls the REST API over the controller port, as any other program
// on the controller's host would. So it works while the public port is closed.
type client struct {
	base  string // https://127.0.0.1:7441
	token string
	http  *http.Client
}

// callTimeout bounds one call; waits for results pass their own context.
const callTimeout = 30 * time.Second

// newClient trusts the certificates in caFile alone, which an http address
// does not need.
func newClient(base, caFile, tokenFile string) (*client, error) {
	var secure *tls.Config
	if strings.HasPrefix(base, "https:") {
		var err error
		if secure, err = trusting(caFile); err != nil {
			return nil, err
		}
	}
	token, err := os.ReadFile(tokenFile)
	if err != nil {
		return nil, fmt.Errorf("read the API token: %w", err)
	}
	return &client{
		base:  strings.TrimRight(base, "/"),
		token: strings.TrimSpace(string(token)),
		http: &http.Client{Transport: &http.Transport{
			TLSClientConfig:     secure,
			MaxIdleConnsPerHost: 4,
		}},
	}, nil
}

// trusting trusts the fleet's CA. A file that begins with the certificate of a
// server, as that of a controller with one port does, stands for this server
// alone: its names are those that the public uses.
func trusting(caFile string) (*tls.Config, error) {
	text, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("read the certificates to trust: %w", err)
	}
	pool := x509.NewCertPool()
	block, _ := pem.Decode(text)
	if block == nil || !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s holds no certificate", caFile)
	}
	first, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", caFile, err)
	}
	conf := &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}
	if first.IsCA && len(first.DNSNames)+len(first.IPAddresses) == 0 {
		return conf, nil
	}
	conf.InsecureSkipVerify = true //nolint:gosec // the comparison below is stricter
	conf.VerifyConnection = func(peer tls.ConnectionState) error {
		if len(peer.PeerCertificates) == 0 || !first.Equal(peer.PeerCertificates[0]) {
			return fmt.Errorf("the server shows another certificate than %s", caFile)
		}
		return nil
	}
	return conf, nil
}

// problem is an RFC 9457 document as the API sends it.
type problem struct {
	Status int    `json:"status"`
	Code   string `json:"code"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Hint   string `json:"hint"`
}

func (p *problem) Error() string {
	text := p.Detail
	if text == "" {
		text = p.Title
	}
	if p.Hint != "" {
		text += " " + p.Hint
	}
	return fmt.Sprintf("%s (%s)", text, p.Code)
}

// call sends in as JSON and decodes the answer into out; both may be nil. An
// answer of 400 or more is a *problem.
func (c *client) call(ctx context.Context, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 400 {
		p := &problem{Status: resp.StatusCode, Code: "http_" + fmt.Sprint(resp.StatusCode), Title: resp.Status}
		_ = json.Unmarshal(data, p) // a body that is no problem document leaves the status line
		return p
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}

// runFile is DIR/run.json: what other programs on this machine need to know of
// a running `headgate up`. It is written last, by rename, when the public port
// is open, and removed at a clean stop.
type runFile struct {
	PublicURL     string     `json:"public_url"`
	ControllerURL string     `json:"controller_url"`
	CAFile        string     `json:"ca_file"`
	TokenFile     string     `json:"token_file"`
	DatabaseURL   string     `json:"database_url"`
	Agents        []runAgent `json:"agents"`
	PID           int        `json:"pid"`
}

type runAgent struct {
	ID      string `json:"id"`
	Name    string `json:"name"`
	Address string `json:"address"`
	DataDir string `json:"data_dir"`
	PID     int    `json:"pid"`
}

const runFileName = "run.json"

func (r runFile) write(dir string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	temp := filepath.Join(dir, runFileName+".new")
	if err := os.WriteFile(temp, append(data, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(temp, filepath.Join(dir, runFileName))
}

func readRunFile(dir string) (runFile, error) {
	var r runFile
	data, err := os.ReadFile(filepath.Join(dir, runFileName))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(data, &r)
}
