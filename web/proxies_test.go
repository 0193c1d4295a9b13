package web_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"headgate/internal/auth"
	"headgate/internal/kinds"
	"headgate/internal/testkit"
	"headgate/listener"
	"headgate/tasks"
)

const (
	proxyHost  = "ops.example.org" // as in the examples
	proxyWait  = time.Minute       // for what takes milliseconds on a machine that is not busy
	proxyStart = 5                 // tries to start a proxy: its port may be taken in between
	clientAddr = "127.0.0.5"       // of the browser; the proxy itself comes from 127.0.0.1
)

// change is one edit of an example file; it must find its text.
type change struct{ from, to string }

// proxyExample is a file below deploy/proxy with the program that reads it.
type proxyExample struct {
	file, program, pkg string
	// local gives the edits that put the example on this machine.
	local func(port, upstream, dir string) []change
	// ownHost is the edit for a host of its own, as the example describes it.
	ownHost change
	// args writes what the program needs beside and gives its arguments.
	args func(t *testing.T, dir, config string) []string
}

func nginxExample() proxyExample {
	return proxyExample{
		file: "nginx.conf", program: "nginx", pkg: "nginx",
		local: func(port, upstream, dir string) []change {
			return []change{
				{"listen 443 ssl", "listen 127.0.0.1:" + port + " ssl"},
				{"server 127.0.0.1:7440;", "server " + upstream + ";"},
				{"/etc/ssl/ops.example.org.crt", dir + "/crt.pem"},
				{"/etc/ssl/ops.example.org.key", dir + "/key.pem"},
			}
		},
		ownHost: change{"location /headgate/ {", "location / {"},
		args: func(t *testing.T, dir, config string) []string {
			t.Helper()
			around := "daemon off;\nmaster_process off;\npid " + dir + "/pid;\nerror_log stderr;\nevents {}\nhttp {\naccess_log off;\n"
			for _, what := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
				around += what + "_temp_path " + dir + "/" + what + ";\n"
			}
			writeText(t, dir+"/main.conf", around+"include "+config+";\n}\n")
			return []string{"-p", dir, "-e", "stderr", "-c", dir + "/main.conf"}
		},
	}
}

func haproxyExample() proxyExample {
	return proxyExample{
		file: "haproxy.cfg", program: "haproxy", pkg: "haproxy",
		local: func(port, upstream, dir string) []change {
			return []change{
				{"bind :443 ssl", "bind 127.0.0.1:" + port + " ssl"},
				{"headgate1 127.0.0.1:7440 ", "headgate1 " + upstream + " "},
				{"/etc/haproxy/ops.example.org.pem", dir + "/both.pem"},
			}
		},
		ownHost: change{"use_backend headgate if { path /headgate } or { path_beg /headgate/ }", "default_backend headgate"},
		args:    func(_ *testing.T, _, config string) []string { return []string{"-db", "-f", config} },
	}
}

func writeText(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// writeCertificate makes the certificate of the proxy's host.
func writeCertificate(t *testing.T, dir string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: proxyHost}, DNSNames: []string{proxyHost},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	crt := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	pkcs8 := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})
	writeText(t, dir+"/crt.pem", string(crt))
	writeText(t, dir+"/key.pem", string(pkcs8))
	writeText(t, dir+"/both.pem", string(crt)+string(pkcs8))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(crt)
	return pool
}

// records keeps what was logged.
type records struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *records) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// record is a line of the log.
type record struct {
	Msg, Path, Remote, Via string
}

// find waits for a line.
func (l *records) find(t *testing.T, what string, is func(record) bool) record {
	t.Helper()
	for deadline := time.Now().Add(proxyWait); time.Now().Before(deadline); <-time.After(5 * time.Millisecond) {
		l.mu.Lock()
		lines := strings.Split(l.text.String(), "\n")
		l.mu.Unlock()
		for _, line := range lines {
			var r record
			if json.Unmarshal([]byte(line), &r) == nil && is(r) {
				return r
			}
		}
	}
	t.Fatalf("the log says nothing of %s", what)
	return record{}
}

// proxied is a site behind a real proxy.
type proxied struct {
	*testing.T
	rig    *rig
	log    *records
	client *http.Client // of a browser that is signed out at first
	conns  *connCount
	base   string
}

// connCount counts the connections that requests came over.
type connCount struct {
	mu   sync.Mutex
	from map[string]bool
}

func (c *connCount) count(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		c.from[r.RemoteAddr] = true
		c.mu.Unlock()
		next.ServeHTTP(w, r)
	})
}

func (c *connCount) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.from)
}

// newProxied starts Headgate on a real listener, and the proxy before it.
func newProxied(t *testing.T, example proxyExample, base string) *proxied {
	t.Helper()
	program := testkit.FindProgram(t, example.program, example.pkg)
	log := &records{}
	r := newRig(t, withBase(base), func(r *rig) {
		r.proxies = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}
		r.hosts = []string{proxyHost}
		r.log = slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	r.add("dns-ams-01")
	r.ready()
	p := &proxied{T: t, rig: r, log: log, base: base, conns: &connCount{from: map[string]bool{}}}
	upstream := p.serve()
	dir := t.TempDir()
	roots := writeCertificate(t, dir)
	for try := 1; ; try++ {
		port := p.run(program, example, upstream, dir, roots)
		if port == "" && try < proxyStart {
			continue
		}
		if port == "" {
			t.Fatalf("%s does not start", example.program)
		}
		p.client = newBrowser(t, port, roots)
		return p
	}
}

// serve starts the two ports and gives the address of the public one.
func (p *proxied) serve() string {
	p.Helper()
	l, err := listener.New(p.Context(), listener.Config{Controller: listener.PortConfig{Addr: "127.0.0.1:0"}, Public: listener.PortConfig{Addr: "127.0.0.1:0"}})
	if err != nil {
		p.Fatal(err)
	}
	server := &http.Server{Handler: p.conns.count(p.rig.handler), ConnContext: listener.ConnContext, ReadHeaderTimeout: proxyWait}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(l) })
	p.Cleanup(func() { _ = server.Close(); _ = l.Close(); wg.Wait() })
	l.MarkStable("test")
	addr, err := l.WaitPublic(p.Context())
	if err != nil {
		p.Fatal(err)
	}
	return addr.String()
}

// run starts the proxy and gives its port, or "" if that port was taken.
func (p *proxied) run(program testkit.Program, example proxyExample, upstream, dir string, roots *x509.CertPool) string {
	p.Helper()
	port := freePort(p.T)
	text, err := os.ReadFile(filepath.Join("..", "deploy", "proxy", example.file))
	if err != nil {
		p.Fatal(err)
	}
	config := string(text)
	changes := example.local(port, upstream, dir)
	if p.base == "" {
		changes = append(changes, example.ownHost)
	}
	for _, c := range changes {
		code := config[strings.LastIndex(config, "\n#"):] // behind the comment at the top
		if strings.Count(code, c.from) != 1 {
			p.Fatalf("%s has not exactly one %q", example.file, c.from)
		}
		config = config[:len(config)-len(code)] + strings.Replace(code, c.from, c.to, 1)
	}
	name := filepath.Join(dir, example.file)
	writeText(p.T, name, config)
	cmd := program.Command(context.WithoutCancel(p.Context()), example.args(p.T, dir, name)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		p.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	if !listens(port, roots, ended) {
		_ = cmd.Process.Kill() // it may have ended by itself
		<-ended
		p.Logf("%s said: %s", example.program, said.String())
		return ""
	}
	p.Cleanup(func() { stopProxy(p.T, cmd, ended) })
	return port
}

// listens waits until the proxy is at the port, and no other program that took
// it; it says false if the proxy ended.
func listens(port string, roots *x509.CertPool, ended <-chan struct{}) bool {
	for deadline := time.Now().Add(proxyWait); time.Now().Before(deadline); {
		conn, err := tls.Dial("tcp", "127.0.0.1:"+port, &tls.Config{RootCAs: roots, ServerName: proxyHost, MinVersion: tls.VersionTLS12})
		if err == nil {
			_ = conn.Close()
			return true
		}
		select {
		case <-ended:
			return false
		case <-time.After(10 * time.Millisecond):
		}
	}
	return false
}

func stopProxy(t *testing.T, cmd *exec.Cmd, ended <-chan struct{}) {
	t.Helper()
	_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
	select {
	case <-ended:
	case <-time.After(proxyWait):
		_ = cmd.Process.Kill()
		<-ended
		t.Errorf("%s did not stop", cmd.Path)
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// newBrowser makes a client that reaches the proxy by its name from an address
// of its own, over HTTP/2 and with cookies.
func newBrowser(t *testing.T, port string, roots *x509.CertPool) *http.Client {
	t.Helper()
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(clientAddr)}}
	transport := &http.Transport{
		ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, "127.0.0.1:"+port)
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &http.Client{
		Transport: transport, Jar: jar, Timeout: 2 * proxyWait,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// do sends a request as a browser on the site would, with an Origin.
func (p *proxied) do(method, path, body string, header ...string) *http.Response {
	p.Helper()
	req, err := http.NewRequestWithContext(p.Context(), method, "https://"+proxyHost+p.base+path, strings.NewReader(body))
	if err != nil {
		p.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Origin", "https://"+proxyHost)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := p.client.Do(req)
	if err != nil {
		p.Fatalf("%s %s: %v", method, path, err)
	}
	p.Cleanup(func() { _ = res.Body.Close() })
	return res
}

// text gives the body of an answer with the wanted status.
func (p *proxied) text(res *http.Response, status int) string {
	p.Helper()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		p.Fatal(err)
	}
	if res.StatusCode != status || res.ProtoMajor != 2 {
		p.Fatalf("%s: %s %d, want %d: %s", res.Request.URL, res.Proto, res.StatusCode, status, body)
	}
	return string(body)
}

// The examples of docs/proxies.md do what it says, with the real programs.
func TestExamplesOfProxies(t *testing.T) {
	t.Parallel()
	for _, example := range []proxyExample{nginxExample(), haproxyExample()} {
		for _, base := range []string{"/headgate", ""} {
			t.Run(example.program+base, func(t *testing.T) {
				t.Parallel()
				p := newProxied(t, example, base)
				p.signIn()
				p.pages()
				p.posts()
				p.longPolls()
				p.streams()
				p.spoofs()
			})
		}
	}
}

// signIn goes through the form; the cookie is for TLS and this path only.
func (p *proxied) signIn() {
	p.Helper()
	p.text(p.do("GET", "/sign-in", ""), http.StatusOK)
	form := url.Values{"code": {p.rig.link("rosa", auth.Admin)}, "next": {"/tasks"}}
	res := p.do("POST", "/sign-in", form.Encode(), "Content-Type", "application/x-www-form-urlencoded")
	p.text(res, http.StatusSeeOther)
	if got := res.Header.Get("Location"); got != p.base+"/tasks" {
		p.Errorf("after signing in: %s", got)
	}
	if cookies := res.Cookies(); len(cookies) != 1 || !cookies[0].Secure || cookies[0].Path != p.base+"/" {
		p.Errorf("cookies: %v", cookies)
	}
	got := p.log.find(p.T, "the sign-in", func(r record) bool { return r.Msg == "signed in" && r.Remote != "" })
	if got.Remote != clientAddr {
		p.Errorf("signed in from %s", got.Remote)
	}
}

// pages are there, show addresses that lead back here, and do not cost a
// connection to Headgate each.
func (p *proxied) pages() {
	p.Helper()
	page := p.text(p.do("GET", "/tasks", ""), http.StatusOK)
	for _, want := range []string{"Signed in as rosa", "https://" + proxyHost + p.base + "/api/v1/tasks", `href="` + p.base + `/agents"`} {
		if !strings.Contains(page, want) {
			p.Errorf("the page does not say %q", want)
		}
	}
	if p.base != "" {
		res := p.do("GET", "", "")
		if to := res.Header.Get("Location"); res.StatusCode/100 != 3 || !strings.HasSuffix(to, p.base+"/") {
			p.Errorf("the bare base path: %d %s", res.StatusCode, to)
		}
	}
	before := p.conns.len()
	const pages = 30
	for range pages {
		p.text(p.do("GET", "/agents", ""), http.StatusOK)
	}
	if n := p.conns.len() - before; n > pages/2 {
		p.Errorf("%d pages took %d connections from the proxy", pages, n)
	}
}

// posts pass with the cookie alone, and bodies beyond a megabyte too.
func (p *proxied) posts() {
	p.Helper()
	res := p.do("POST", "/api/v1/tasks?wait=30s", `{"agent":"dns-ams-01","kind":"core.echo","args":{"n":1}}`)
	var task struct{ ID, State string }
	if err := json.Unmarshal([]byte(p.text(res, http.StatusOK)), &task); err != nil || task.State != "completed" {
		p.Errorf("task %+v, %v", task, err)
	}
	if got := res.Header.Get("Location"); got != p.base+"/api/v1/tasks/"+task.ID {
		p.Errorf("Location %s", got)
	}
	long := `{"tasks":[` + strings.Repeat(" ", 3<<20) + `]}`
	if text := p.text(p.do("POST", "/api/v1/tasks/batch", long), http.StatusUnprocessableEntity); !strings.Contains(text, `"empty_batch"`) {
		p.Errorf("a long body: %s", text)
	}
}

// longPolls end when their time is over, or when the task does.
func (p *proxied) longPolls() {
	p.Helper()
	t := p.rig.submit("dns-ams-01", kinds.Sleep, `{"seconds":3600}`)
	p.rig.started(t.ID)
	path := "/api/v1/tasks/" + t.ID.String() + "?wait="
	begin := time.Now()
	if text := p.text(p.do("GET", path+"2s", ""), http.StatusOK); !strings.Contains(text, `"waiting-for-agent-response"`) || time.Since(begin) < 2*time.Second {
		p.Errorf("after %v: %s", time.Since(begin), text)
	}
	answer := make(chan string, 1)
	go func() {
		res, err := p.client.Get("https://" + proxyHost + p.base + path + "60s")
		if err != nil {
			answer <- err.Error()
			return
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		answer <- fmt.Sprint(string(body), err)
	}()
	p.rig.runner.Finish(t.Agent.Num, tasks.Ending{Outcome: tasks.Succeeded})
	if text := <-answer; !strings.Contains(text, `"succeeded"`) {
		p.Errorf("the long poll: %s", text)
	}
}

// streams arrive at once: nothing between collects them.
func (p *proxied) streams() {
	p.Helper()
	res := p.do("GET", "/api/v1/events?topics=tasks", "", "Accept", "text/event-stream")
	if res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != "text/event-stream" {
		p.Fatalf("events: %d %v", res.StatusCode, res.Header)
	}
	lines := bufio.NewScanner(res.Body)
	until := func(part string) {
		p.Helper()
		for lines.Scan() {
			if strings.Contains(lines.Text(), part) {
				return
			}
		}
		p.Fatalf("the stream ended before %s: %v", part, lines.Err())
	}
	until("event: hello")
	// A proxy that collects would hold every one of them back until the next
	// heartbeat; a busy machine may be late with some.
	fastest := time.Hour
	for range 5 {
		begin := time.Now()
		t := p.rig.submit("dns-ams-01", kinds.Echo, `{}`)
		until(`"` + t.ID.String() + `"`)
		fastest = min(fastest, time.Since(begin))
	}
	if fastest > time.Second {
		p.Errorf("events took %v and more", fastest)
	}
	_ = res.Body.Close() // before the next: it is one of few streams
}

// spoofs by the client do not come through.
func (p *proxied) spoofs() {
	p.Helper()
	p.text(p.do("GET", "/agents?q=spoof", "", "X-Forwarded-For", "203.0.113.5", "X-Forwarded-Host", "evil.example", "X-Forwarded-Proto", "http", "X-Request-Id", "spoof"), http.StatusOK)
	got := p.log.find(p.T, "the request", func(r record) bool { return r.Msg == "request" && r.Path == "/agents" })
	if got.Remote != clientAddr || got.Via != "127.0.0.1" {
		p.Errorf("the log names %s via %s", got.Remote, got.Via)
	}
	if page := p.text(p.do("GET", "/tasks", "", "X-Forwarded-Host", "evil.example", "X-Forwarded-Proto", "http"), http.StatusOK); strings.Contains(page, "evil.example") || strings.Contains(page, "http://") {
		p.Error("the page shows an address that the client made up")
	}
	if p.base == "" {
		return
	}
	req, err := http.NewRequestWithContext(p.Context(), http.MethodGet, "https://"+proxyHost+"/elsewhere", nil)
	if err != nil {
		p.Fatal(err)
	}
	res, err := p.client.Do(req)
	if err != nil {
		p.Fatal(err)
	}
	defer res.Body.Close()
	if res.Header.Get("X-Request-Id") != "" {
		p.Error("a path beside the base path reaches Headgate")
	}
}
