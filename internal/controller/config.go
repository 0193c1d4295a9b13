package controller

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"headgate/handlers"
	"headgate/internal/store"
	"headgate/listener"
	"headgate/web"
)

// Config is the whole configuration of a controller. Keys lists each setting
// with its names in the file, on the command line and in the environment.
type Config struct {
	Data                string // state directory: keys, certificates, lock
	PublicAddr          string
	ControllerAddr      string
	TwoPhase            bool // false: one public port, and no controller port
	ControllerAdvertise string
	DatabaseURL         string
	DatabaseDirectURL   string
	Fleet               string
	TLSCertFile         string
	TLSKeyFile          string
	ProxyTLS            bool
	TrustedProxies      []netip.Prefix // networks of proxies whose X-Forwarded-* headers are believed
	BasePath            string         // "" or a slash and more, no slash at the end
	AllowedHosts        []string
	AdminTokenFile      string
	AllowLoopbackAgents bool
	UnsafeDurability    bool
	OpenDelay           time.Duration
	Listening           Listening
	Queueing            Queueing
	Retention           store.Retention
	DrainLead           time.Duration
	DrainSpread         time.Duration
	DrainTimeout        time.Duration
	ActivatedHold       time.Duration
	LogLevel            string

	given []string // names of the settings that a source has set
}

// Defaults of the addresses lie below the ephemeral range on purpose, so that
// no outgoing connection can take them.
const (
	DefaultPublicAddr     = ":7440"
	DefaultControllerAddr = "127.0.0.1:7441"
	defaultDrainSpread    = 5 * time.Second
	defaultDrainTimeout   = 30 * time.Second
)

// DefaultConfig gives the configuration before file, environment and flags.
func DefaultConfig() Config {
	return Config{
		Data:           "./.headgate",
		PublicAddr:     DefaultPublicAddr,
		ControllerAddr: DefaultControllerAddr,
		TwoPhase:       true,
		Fleet:          "headgate",
		OpenDelay:      listener.DefaultOpenDelay,
		Listening:      defaultListening(),
		Queueing:       defaultQueueing(),
		DrainSpread:    defaultDrainSpread,
		DrainTimeout:   defaultDrainTimeout,
		ActivatedHold:  listener.DefaultActivatedHold,
		LogLevel:       "info",
	}
}

// Key is one setting. Name is the flag (--public-addr); the file and the
// environment use public_addr and HEADGATE_PUBLIC_ADDR.
type Key struct {
	Name string
	Help string
	Bool bool // the flag may stand without a value
	Live bool // a reload applies it; the others need a restart
	set  func(*Config, string) error
	get  func(Config) string
}

// FileName gives the key's name in the configuration file.
func (k Key) FileName() string { return strings.ReplaceAll(k.Name, "-", "_") }

// EnvName gives the key's name in the environment.
func (k Key) EnvName() string { return "HEADGATE_" + strings.ToUpper(k.FileName()) }

// Default gives the key's default as text.
func (k Key) Default() string { return k.get(DefaultConfig()) }

// Keys lists every setting, in the order of the documentation.
func Keys() []Key {
	return slices.Concat(generalKeys(), listeningKeys(), queueKeys(), retentionKeys(), stopKeys())
}

func generalKeys() []Key {
	return []Key{
		text("data", "state directory: keys, certificates, lock", func(c *Config) *string { return &c.Data }),
		text("public-addr", "address of the public port", func(c *Config) *string { return &c.PublicAddr }),
		text("controller-addr", "address of the controller port", func(c *Config) *string { return &c.ControllerAddr }),
		flag("two-phase", "false = one public port, open from the start, that serves everything", func(c *Config) *bool { return &c.TwoPhase }),
		text("controller-advertise", "address at which other controllers reach this one; that of the controller port if left out", func(c *Config) *string { return &c.ControllerAdvertise }),
		text("database-url", "PostgreSQL, as URL or keywords; several hosts allowed", func(c *Config) *string { return &c.DatabaseURL }),
		text("database-direct-url", "the same database past a pooler in transaction mode, if database-url leads through one", func(c *Config) *string { return &c.DatabaseDirectURL }),
		text("fleet", "name of the fleet, put into certificates when the CA is made", func(c *Config) *string { return &c.Fleet }),
		text("tls-cert-file", "certificate of the public port (PEM)", func(c *Config) *string { return &c.TLSCertFile }),
		text("tls-key-file", "key of the public port (PEM)", func(c *Config) *string { return &c.TLSKeyFile }),
		flag("proxy-tls", "a proxy in front of the public port ends TLS", func(c *Config) *bool { return &c.ProxyTLS }),
		networks("trusted-proxies", "addresses or networks of proxies in front, whose X-Forwarded-For, -Proto and -Host are believed", func(c *Config) *[]netip.Prefix { return &c.TrustedProxies }),
		basePath("base-path", "path below which a proxy shows the public port, for example /headgate", func(c *Config) *string { return &c.BasePath }),
		list("allowed-hosts", "host names under which browsers reach the public port, comma separated", func(c *Config) *[]string { return &c.AllowedHosts }),
		text("admin-token-file", "file with an API token of role admin; made if missing", func(c *Config) *string { return &c.AdminTokenFile }),
		flag("allow-loopback-agents", "agents may be paired at loopback addresses", func(c *Config) *bool { return &c.AllowLoopbackAgents }),
		flag("unsafe-durability", "accept a database that may lose acknowledged commits", func(c *Config) *bool { return &c.UnsafeDurability }),
		span("open-delay", "how long the controller must be stable before the public port opens", func(c *Config) *time.Duration { return &c.OpenDelay }),
	}
}

// stopKeys lists what a stop goes by, and what is left.
func stopKeys() []Key {
	return []Key{
		span("drain-lead", "how long the public port goes on at a stop after /readyz has failed", func(c *Config) *time.Duration { return &c.DrainLead }),
		span("drain-spread", "time over which a stop ends event streams and waits, at most half of drain-timeout", func(c *Config) *time.Duration { return &c.DrainSpread }),
		span("drain-timeout", "how long a stop waits for open requests after drain-lead", func(c *Config) *time.Duration { return &c.DrainTimeout }),
		span("activated-hold", "how long connections to a closed public port wait if its socket was passed by systemd; then they are reset", func(c *Config) *time.Duration { return &c.ActivatedHold }),
		text("log-level", "debug, info, warn or error", func(c *Config) *string { return &c.LogLevel }),
	}
}

func text(name, help string, at func(*Config) *string) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error { *at(c) = v; return nil },
		get: func(c Config) string { return *at(&c) },
	}
}

func flag(name, help string, at func(*Config) *bool) Key {
	return Key{
		Name: name, Help: help, Bool: true,
		set: func(c *Config, v string) error {
			b, err := strconv.ParseBool(v)
			if err != nil {
				return fmt.Errorf("%q is not true or false", v)
			}
			*at(c) = b
			return nil
		},
		get: func(c Config) string { return strconv.FormatBool(*at(&c)) },
	}
}

func span(name, help string, at func(*Config) *time.Duration) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			d, err := time.ParseDuration(v)
			if err != nil || d < 0 {
				return fmt.Errorf("%q is not a duration like 2s or 500ms", v)
			}
			*at(c) = d
			return nil
		},
		get: func(c Config) string { return at(&c).String() },
	}
}

func listItems(v string) []string {
	return strings.FieldsFunc(v, func(r rune) bool { return r == ',' || r == ' ' })
}

func list(name, help string, at func(*Config) *[]string) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			*at(c) = listItems(v)
			return nil
		},
		get: func(c Config) string { return strings.Join(*at(&c), ",") },
	}
}

// networks reads addresses and networks; everybody is no network of proxies.
func networks(name, help string, at func(*Config) *[]netip.Prefix) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			var all []netip.Prefix
			for _, item := range listItems(v) {
				n, err := netip.ParsePrefix(item)
				if err != nil {
					a, err := netip.ParseAddr(item)
					if err != nil {
						return fmt.Errorf("%q is not an address or a network such as 10.0.0.0/8", item)
					}
					n = netip.PrefixFrom(a, a.BitLen())
				}
				if n.Addr().Is4In6() || n.Addr().Zone() != "" {
					return fmt.Errorf("%q: write the plain address, without ::ffff: and zone", item)
				}
				if n.Bits() == 0 {
					return fmt.Errorf("%q is everybody, who could then pose as anybody", item)
				}
				all = append(all, n.Masked())
			}
			*at(c) = all
			return nil
		},
		get: func(c Config) string {
			var texts []string
			for _, n := range *at(&c) {
				texts = append(texts, n.String())
			}
			return strings.Join(texts, ",")
		},
	}
}

func basePath(name, help string, at func(*Config) *string) Key {
	return Key{
		Name: name, Help: help,
		set: func(c *Config, v string) error {
			clean, err := web.CleanBasePath(v)
			if err != nil {
				return err
			}
			if clean != "" && handlers.OwnPath(clean) {
				return fmt.Errorf("%q begins like a path of the API", v)
			}
			*at(c) = clean
			return nil
		},
		get: func(c Config) string { return *at(&c) },
	}
}

// Sources says where settings come from; later ones win: defaults, File,
// Environ, Flags (by key name).
type Sources struct {
	File    string
	Environ []string // for finding unknown HEADGATE_ names
	Flags   map[string]string
}

// LoadConfig puts the configuration together and checks it. Its error lists
// every problem at once, each with the name of the key.
func LoadConfig(src Sources) (Config, error) {
	c := DefaultConfig()
	var problems []error
	problems = append(problems, applyFile(&c, src.File)...)
	problems = append(problems, applyEnv(&c, src)...)
	for name, v := range src.Flags {
		if err := apply(&c, "--"+name, func(k Key) bool { return k.Name == name }, v); err != nil {
			problems = append(problems, err)
		}
	}
	problems = append(problems, c.validate()...)
	slices.SortStableFunc(problems, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return c, errors.Join(problems...)
}

func applyFile(c *Config, name string) []error {
	if name == "" {
		return nil
	}
	f, err := os.Open(name)
	if err != nil {
		return []error{fmt.Errorf("configuration file: %w", err)}
	}
	defer f.Close()
	var values map[string]yaml.Node
	if err := yaml.NewDecoder(f).Decode(&values); err != nil && !errors.Is(err, io.EOF) {
		return []error{fmt.Errorf("configuration file %s: %w", name, err)}
	}
	var problems []error
	for key, node := range values {
		where := fmt.Sprintf("%s, line %d: %s", filepath.Base(name), node.Line, key)
		value, err := scalar(node)
		if err == nil {
			err = apply(c, where, func(k Key) bool { return k.FileName() == key }, value)
		}
		if err != nil {
			problems = append(problems, err)
		}
	}
	return problems
}

// scalar gives a YAML value as text; a list of texts becomes a comma list.
func scalar(n yaml.Node) (string, error) {
	switch n.Kind {
	case yaml.ScalarNode:
		return n.Value, nil
	case yaml.SequenceNode:
		var items []string
		if err := n.Decode(&items); err != nil {
			return "", fmt.Errorf("line %d: want a list of texts", n.Line)
		}
		return strings.Join(items, ","), nil
	}
	return "", fmt.Errorf("line %d: want a value or a list of values", n.Line)
}

func applyEnv(c *Config, src Sources) []error {
	var problems []error
	for _, kv := range src.Environ {
		name, value, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "HEADGATE_") || strings.HasPrefix(name, "HEADGATE_AGENT_") || strings.HasPrefix(name, "HEADGATE_TEST_") {
			continue
		}
		if err := apply(c, name, func(k Key) bool { return k.EnvName() == name }, value); err != nil {
			problems = append(problems, err)
		}
	}
	return problems
}

func apply(c *Config, where string, is func(Key) bool, value string) error {
	keys := Keys()
	i := slices.IndexFunc(keys, is)
	if i < 0 {
		return fmt.Errorf("%s: no such setting; `headgate serve --help` lists them", where)
	}
	if err := keys[i].set(c, value); err != nil {
		return fmt.Errorf("%s: %w", where, err)
	}
	c.given = append(c.given, keys[i].Name)
	return nil
}

// validate gives every problem of the values themselves.
func (c Config) validate() []error {
	var problems []error
	bad := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if c.Data == "" {
		bad("data: must name a directory")
	}
	if c.DatabaseURL == "" {
		bad("database-url: must name a PostgreSQL server, for example postgres://headgate@db.example/headgate?sslmode=verify-full; `headgate up` starts a private one by itself")
	}
	if !slices.Contains([]string{"debug", "info", "warn", "error"}, c.LogLevel) {
		bad("log-level: %q is not debug, info, warn or error", c.LogLevel)
	}
	_, publicPort := checkAddr(bad, "public-addr", c.PublicAddr)
	_, controllerPort := checkAddr(bad, "controller-addr", c.ControllerAddr)
	if !c.TwoPhase {
		c.validateOnePort(bad)
	} else if publicPort == controllerPort && publicPort != "0" && publicPort != "" {
		bad("public-addr and controller-addr: both use port %s; the two ports must differ", publicPort)
	}
	c.validateListening(bad)
	c.validateQueueing(bad)
	if c.ControllerAdvertise != "" {
		checkAdvertise(bad, c.ControllerAdvertise)
	}
	if (c.TLSCertFile == "") != (c.TLSKeyFile == "") {
		bad("tls-cert-file and tls-key-file: give both or none")
	}
	if !c.publicTLS() && !c.ProxyTLS && !isLoopbackAddr(c.PublicAddr) {
		bad("public-addr: %s would be served without TLS beyond this machine; give tls-cert-file and tls-key-file, or proxy-tls if a proxy ends TLS, or listen on 127.0.0.1", c.PublicAddr)
	}
	return problems
}

// validateOnePort finds settings of a controller port that is not to be. That
// port's usual address, where somebody wrote it down, is one of them.
func (c Config) validateOnePort(bad func(string, ...any)) {
	if slices.Contains(c.given, "controller-addr") {
		bad("controller-addr: with two-phase false there is no controller port; leave one of the two out")
	}
	if slices.Contains(c.given, "controller-advertise") {
		bad("controller-advertise: with two-phase false there is no port that other controllers could reach; leave one of the two out")
	}
}

// checkAdvertise finds an address that nobody could call.
func checkAdvertise(bad func(string, ...any), addr string) {
	host, port := checkAddr(bad, "controller-advertise", addr)
	if port == "" {
		return
	}
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		bad("controller-advertise: %q names no host that others could call; give an address or a name of this one", addr)
	}
	if port == "0" {
		bad("controller-advertise: others cannot call port 0; give the port of controller-addr, or the one that leads to it")
	}
}

func checkAddr(bad func(string, ...any), key, addr string) (host, port string) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		bad("%s: %q is not host:port (port 0 takes a free one)", key, addr)
		return "", ""
	}
	if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
		bad("%s: port %q is not a number from 0 to 65535", key, port)
	}
	return host, port
}

// drainSpread gives the streams at most half of the time that all have.
func (c Config) drainSpread() time.Duration { return min(c.DrainSpread, c.DrainTimeout/2) }

func (c Config) publicTLS() bool { return c.TLSCertFile != "" }

func isLoopbackAddr(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
