package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"gopkg.in/yaml.v3"

	"headgate/internal/testkit"
)

// forPrometheus is the folder of what is shipped for Prometheus.
const forPrometheus = "../../deploy/prometheus"

// promtool runs it in the folder of what is shipped.
func promtool(t *testing.T, stdin string, args ...string) {
	t.Helper()
	cmd := testkit.FindProgram(t, "promtool", "prometheus").Command(t.Context(), args...)
	cmd.Dir = forPrometheus
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func TestTheShippedAlertsFireWhenTheyShould(t *testing.T) {
	t.Parallel()
	promtool(t, "", "check", "rules", "headgate.rules.yml")
	promtool(t, "", "test", "rules", "headgate.rules.test.yml")
	promtool(t, "", "check", "config", "--syntax-only", "prometheus.yml")
}

type alertRule struct{ Alert, Expr string }

// shippedAlerts reads the alerts from their file.
func shippedAlerts(t *testing.T) []alertRule {
	t.Helper()
	var file struct{ Groups []struct{ Rules []alertRule } }
	readYAML(t, "headgate.rules.yml", &file)
	var all []alertRule
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("no alerts")
	}
	return all
}

func readYAML(t *testing.T, name string, to any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(forPrometheus, name))
	if err == nil {
		err = yaml.Unmarshal(data, to)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestEachAlertIsTriedFiringAndNot(t *testing.T) {
	t.Parallel()
	var file struct {
		Tests []struct {
			Cases []struct {
				Name string `yaml:"alertname"`
				Want []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		}
	}
	readYAML(t, "headgate.rules.test.yml", &file)
	fires, silent := map[string]bool{}, map[string]bool{}
	for _, group := range file.Tests {
		for _, c := range group.Cases {
			if len(c.Want) > 0 {
				fires[c.Name] = true
			} else {
				silent[c.Name] = true
			}
		}
	}
	manual, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, rule := range shippedAlerts(t) {
		if !strings.Contains(string(manual), "| `"+rule.Alert+"` |") {
			t.Errorf("docs/operations.md does not list %s", rule.Alert)
		}
		if !fires[rule.Alert] || !silent[rule.Alert] {
			t.Errorf("%s: tried firing %t, tried not firing %t", rule.Alert, fires[rule.Alert], silent[rule.Alert])
		}
	}
}

// metricName finds the names of metrics in an expression: ours, and those
// that every Go program has.
var metricName = regexp.MustCompile(`\b(?:headgate|process|go)_[a-z0-9_]+`)

func TestPrometheusReadsARunningController(t *testing.T) {
	t.Parallel()
	i := newInstance(t)
	i.up()
	i.submit("core.ping", map[string]any{}) // so that there is something to measure
	var made struct{ Secret string }
	if err := i.client().call(t.Context(), "POST", "/api/v1/tokens", map[string]any{"name": "prometheus", "role": "metrics"}, &made); err != nil {
		t.Fatal(err)
	}
	scraped := scrape(i, made.Secret)
	promtool(t, scraped, "check", "metrics")
	for _, rule := range shippedAlerts(t) {
		for _, name := range metricName.FindAllString(rule.Expr, -1) {
			if !strings.Contains(scraped, "\n"+name+"{") && !strings.Contains(scraped, "\n"+name+" ") {
				t.Errorf("%s asks for %s, which no controller gives", rule.Alert, name)
			}
		}
	}
	i.prometheus(made.Secret)
}

// scrape reads /metrics as Prometheus does.
func scrape(i *instance, secret string) string {
	i.Helper()
	c := i.client()
	defer c.http.CloseIdleConnections()
	req, err := http.NewRequestWithContext(i.Context(), "GET", c.base+"/metrics", nil)
	if err != nil {
		i.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+secret)
	resp, err := c.http.Do(req)
	if err != nil {
		i.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		i.Fatalf("/metrics: %s %v %s", resp.Status, err, body)
	}
	return string(body)
}

// prometheus runs the real one with the shipped files, in which only the
// controller's address and the pauses are others, and waits until it has read
// the controller and evaluated every rule.
func (i *instance) prometheus(secret string) {
	i.Helper()
	dir := i.TempDir()
	config, err := os.ReadFile(filepath.Join(forPrometheus, "prometheus.yml"))
	if err != nil {
		i.Fatal(err)
	}
	rules, err := os.ReadFile(filepath.Join(forPrometheus, "headgate.rules.yml"))
	if err != nil {
		i.Fatal(err)
	}
	ca, err := os.ReadFile(i.run.CAFile)
	if err != nil {
		i.Fatal(err)
	}
	text := strings.NewReplacer("127.0.0.1:7441", strings.TrimPrefix(i.run.ControllerURL, "https://"), "15s", "1s").Replace(string(config))
	for name, data := range map[string]string{
		"prometheus.yml": text, "headgate.rules.yml": string(rules), "headgate-ca.pem": string(ca), "headgate-token": secret,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600); err != nil {
			i.Fatal(err)
		}
	}
	addr := freeAddr(i.T)
	cmd := testkit.FindProgram(i, "prometheus", "prometheus").Command(context.WithoutCancel(i.Context()),
		"--config.file="+filepath.Join(dir, "prometheus.yml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		i.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if i.Failed() {
			i.Logf("prometheus: %.8000s", out.String())
		}
	}()
	i.awaitPrometheus("http://" + addr)
}

func (i *instance) awaitPrometheus(base string) {
	i.Helper()
	client := &http.Client{Timeout: 10 * time.Second}
	defer client.CloseIdleConnections()
	var problem string
	for end := time.Now().Add(readyWithin); time.Now().Before(end); {
		if problem = readByPrometheus(client, base, len(shippedAlerts(i.T))); problem == "" {
			return
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-i.Context().Done():
		}
	}
	i.Errorf("Prometheus does not get along with the controller: %s", problem)
}

// readByPrometheus says what is still missing; "" = nothing.
func readByPrometheus(client *http.Client, base string, alerts int) string {
	var targets struct {
		Data struct {
			Active []struct{ Health, LastError string } `json:"activeTargets"`
		}
	}
	if err := getJSON(client, base+"/api/v1/targets", &targets); err != nil {
		return err.Error()
	}
	if len(targets.Data.Active) != 1 || targets.Data.Active[0].Health != "up" {
		return fmt.Sprintf("targets %+v", targets.Data.Active)
	}
	var rules struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
	}
	if err := getJSON(client, base+"/api/v1/rules", &rules); err != nil {
		return err.Error()
	}
	good := 0
	for _, g := range rules.Data.Groups {
		for _, r := range g.Rules {
			if r.Health != "ok" {
				return fmt.Sprintf("rule %+v", r)
			}
			good++
		}
	}
	if good != alerts {
		return fmt.Sprintf("%d rules, want %d", good, alerts)
	}
	return ""
}

func getJSON(client *http.Client, url string, to any) error {
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(to)
}

// freeAddr gives a loopback address that was free a moment ago, for programs
// that cannot tell which port they took. It is none of those that systems give
// to clients and for port 0, so that no other test gets it in the meantime.
func freeAddr(t *testing.T) string {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", 12_000+rand.IntN(20_000)))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no port is free")
	return ""
}
