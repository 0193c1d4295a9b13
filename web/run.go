package web

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"uuid"

	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/kinds"
	"headgate/tasks"
)

const (
	// selectAgents is up to how many agents are offered in a list; beyond
	// that a name is typed, with suggestions.
	selectAgents = 100
	// suggestAgents bounds the suggestions: each is a line of the page.
	suggestAgents = 500
	argsPointer   = "/args"
	argPrefix     = "arg."   // of inputs for members of args
	paramPrefix   = "param." // of inputs for parameters of a program
)

// runPage is the form that submits a task.
type runPage struct {
	Agents   []option // nil = too many for a list
	Suggest  []string
	Agent    field
	Kinds    []option
	Kind     *kinds.Kind
	Program  *field // of cmd.run
	Note     string // about the program
	Fields   []field
	Raw      *field // arguments as JSON, instead of fields
	ToRaw    string // address of the same form with the arguments as JSON
	ToFields string
	Timeout  field
	Priority field
	Key      string
	Error    *problem
	Rest     []fault.Field // complaints that belong to no field
	Line     string        // why the agent is not ready, "" when it is
	Health   string
	Curl     string
	NoAgents bool

	agent *fleet.View
}

func (s *server) runForm(w http.ResponseWriter, r *http.Request) error {
	d, _ := s.buildRun(r, r.URL.Query())
	d.forgive()
	return s.showRun(w, r, http.StatusOK, d)
}

// forgive takes back complaints about fields that nobody has filled in yet.
func (d *runPage) forgive() {
	for i := range d.Fields {
		if d.Fields[i].Value == "" {
			d.Fields[i].Error = ""
		}
	}
	if d.Program != nil && d.Program.Value == "" {
		d.Program.Error = ""
	}
}

func (s *server) showRun(w http.ResponseWriter, r *http.Request, status int, d *runPage) error {
	p := s.newPage(r, "Run a task", "run", d)
	p.Path = "/run"
	return s.render(w, r, status, "run", p)
}

// submitRun submits the form's task. The key in the form makes a second click
// on the button give the same task.
func (s *server) submitRun(w http.ResponseWriter, r *http.Request) error {
	d, sub := s.buildRun(r, r.PostForm)
	if !d.good() {
		d.Error = &problem{Title: "The task was not submitted", Text: "Something in the form is not right; it is marked below."}
		return s.showRun(w, r, http.StatusUnprocessableEntity, d)
	}
	p := principal(r)
	key := tasks.Idempotency{Principal: p.Kind + ":" + p.ID.String(), Route: "POST /run", Key: r.PostFormValue("key"), Hash: sha256.Sum256([]byte(r.PostForm.Encode()))}
	if _, err := uuid.Parse(key.Key); err != nil {
		key = tasks.Idempotency{}
	}
	t, err := s.cfg.Tasks.Submit(r.Context(), sub, p.Actor(), key)
	if err != nil {
		f, ok := errors.AsType[*fault.Error](err)
		if !ok || f.Kind == fault.Internal {
			return err
		}
		d.complain(f)
		return s.showRun(w, r, statusOf(err), d)
	}
	s.redirect(w, r, "/tasks/"+t.ID.String()+"?done=submitted")
	return nil
}

// complain puts a refusal beside the fields it is about.
func (d *runPage) complain(f *fault.Error) {
	pr := problemOf(f)
	pr.Title = "The task was not submitted"
	d.Error = &pr
	d.Key = uuid.NewV4().String()
	rest := blame(d.Fields, f.Fields)
	for _, single := range []*field{&d.Agent, &d.Timeout, &d.Priority, d.Program, d.Raw} {
		if single == nil {
			continue
		}
		one := []field{*single}
		if rest = blame(one, rest); one[0].Error != "" {
			single.Error = one[0].Error
		}
	}
	d.Rest = rest
}

func (d *runPage) good() bool {
	bad := func(f field) bool { return f.Error != "" }
	return d.Kind != nil && d.agent != nil && !slices.ContainsFunc(d.Fields, bad) && !bad(d.Agent) && !bad(d.Timeout) && !bad(d.Priority) &&
		(d.Program == nil || !bad(*d.Program)) && (d.Raw == nil || !bad(*d.Raw))
}

// buildRun makes the form from what was chosen so far, and the task that it
// stands for. Wrong fields are marked.
func (s *server) buildRun(r *http.Request, q url.Values) (*runPage, tasks.Submission) {
	d := &runPage{Key: orElse(q.Get("key"), uuid.NewV4().String())}
	s.chooseAgent(d, q)
	s.chooseKind(d, q)
	var sub tasks.Submission
	d.Timeout = field{Name: "timeout", Label: "Timeout", Sort: "text", Value: strings.TrimSpace(q.Get("timeout")), pointer: "/timeout"}
	d.Priority = field{Name: "priority", Label: "Priority", Sort: "choice", Value: orElse(q.Get("priority"), strconv.Itoa(tasks.DefaultPriority)), Required: true, pointer: "/priority"}
	for n := tasks.MinPriority; n <= tasks.MaxPriority; n++ {
		text := strconv.Itoa(n)
		if name := map[int]string{tasks.MinPriority: ", first", tasks.DefaultPriority: ", usual", tasks.MaxPriority: ", last"}[n]; name != "" {
			text += name
		}
		d.Priority.Options = append(d.Priority.Options, option{Value: strconv.Itoa(n), Text: text})
	}
	d.Priority.choose()
	if d.Timeout.Value != "" {
		v, err := time.ParseDuration(d.Timeout.Value)
		if err != nil || v <= 0 {
			d.Timeout.Error = "must be a duration such as 30s, 5m or 1h30m"
		}
		sub.Timeout = v
	}
	if n, err := strconv.Atoi(d.Priority.Value); err != nil || n < tasks.MinPriority || n > tasks.MaxPriority {
		d.Priority.Error = "must be a whole number from 0 to 9"
	} else {
		sub.Priority = &n
	}
	if d.Kind == nil {
		return d, sub
	}
	args := d.arguments(q)
	sub.Agent, sub.Kind, sub.Args = q.Get("agent"), d.Kind.Name, json.RawMessage(args)
	if d.agent != nil {
		sub.Agent = d.agent.ID.String()
		shown := submission{Agent: d.agent.Name, Kind: sub.Kind, Args: sub.Args, Timeout: durationText(sub.Timeout)}
		if sub.Priority != nil && *sub.Priority != tasks.DefaultPriority {
			shown.Priority = sub.Priority
		}
		if json.Valid(sub.Args) {
			d.Curl = submitCurl(s.origin(r), shown)
		}
	}
	d.links(q, args)
	return d, sub
}

func (s *server) chooseAgent(d *runPage, q url.Values) {
	d.Agent = field{Name: "agent", Label: "Agent", Sort: "choice", Value: strings.TrimSpace(q.Get("agent")), Required: true, pointer: "/agent"}
	all := s.census.now(time.Now())
	d.NoAgents = all.total == 0
	byName := slices.Clone(all.sorted)
	slices.SortStableFunc(byName, func(a, b fleet.View) int { return strings.Compare(a.Name, b.Name) })
	if d.Agent.Value == "" && len(byName) > 0 && len(byName) <= selectAgents {
		d.Agent.Value = byName[0].ID.String()
		for i := range byName { // better one that answers
			if healthOf(&byName[i]) == string(fleet.HealthConnected) {
				d.Agent.Value = byName[i].ID.String()
				break
			}
		}
	}
	if d.Agent.Value != "" {
		if a, err := s.cfg.Fleet.Lookup(d.Agent.Value); err != nil {
			pr := problemOf(err)
			d.Agent.Error = strings.TrimSpace(pr.Text + " " + pr.Hint)
		} else if v, err := s.cfg.Fleet.Get(a.ID); err == nil {
			d.agent, d.Health, d.Line = &v, healthOf(&v), agentLine(&v, 0)
		}
	}
	if len(byName) > selectAgents {
		d.Agent.Sort = "text"
		for _, v := range byName[:min(len(byName), suggestAgents)] {
			d.Suggest = append(d.Suggest, v.Name)
		}
		return
	}
	for i := range byName {
		v := &byName[i]
		text := v.Name
		if h := healthOf(v); h != string(fleet.HealthConnected) {
			text += ", " + h
		}
		d.Agent.Options = append(d.Agent.Options, option{Value: v.ID.String(), Text: text, Selected: d.agent != nil && d.agent.ID == v.ID})
	}
}

// chooseKind offers what the agent allows, or all kinds while nobody knows.
func (s *server) chooseKind(d *runPage, q url.Values) {
	wanted := q.Get("kind")
	var offered []string
	if d.agent != nil {
		for _, o := range d.agent.Live.Kinds {
			offered = append(offered, o.Name)
		}
	}
	for _, k := range s.cfg.Kinds.All() {
		if len(offered) > 0 && !slices.Contains(offered, k.Name) && k.Name != wanted {
			continue
		}
		d.Kinds = append(d.Kinds, option{Value: k.Name, Text: k.Name + ": " + k.Title, Selected: k.Name == wanted})
	}
	if wanted == "" && len(d.Kinds) > 0 {
		wanted = d.Kinds[0].Value
		d.Kinds[0].Selected = true
	}
	if k, err := s.cfg.Kinds.Lookup(wanted); err == nil {
		d.Kind = k
	}
}

// arguments makes the fields for the kind's arguments and gives the JSON text
// that they stand for.
func (d *runPage) arguments(q url.Values) string {
	given := strings.TrimSpace(q.Get("args"))
	sc := readSchema(d.Kind.Schema)
	if q.Get("raw") == "1" || sc.open() {
		return d.rawArguments(given)
	}
	values := fromArgs(q, given)
	if d.Kind.Name == kinds.Run {
		return d.programArguments(values)
	}
	d.Fields = fieldsOf(sc, argPrefix, argsPointer, values)
	args, _ := object(d.Fields)
	return args
}

func (d *runPage) rawArguments(given string) string {
	d.Raw = &field{Name: "args", Label: "Arguments as JSON", Sort: "json", Value: orElse(given, "{}"), pointer: argsPointer}
	var pretty any
	if err := json.Unmarshal([]byte(d.Raw.Value), &pretty); err != nil {
		d.Raw.Error = "is not valid JSON: " + err.Error()
	} else if _, ok := pretty.(map[string]any); !ok {
		d.Raw.Error = "must be a JSON object, such as {}"
	}
	return d.Raw.Value
}

// fromArgs fills inputs that are not given from JSON arguments, so that a task
// can be repeated with changes.
func fromArgs(q url.Values, given string) url.Values {
	if given == "" {
		return q
	}
	values := url.Values{}
	for n, v := range q {
		values[n] = v
	}
	set := func(prefix, name string, v any) {
		if !values.Has(prefix + name) {
			values.Set(prefix+name, scalarText(v))
		}
	}
	var args map[string]any
	dec := json.NewDecoder(strings.NewReader(given))
	dec.UseNumber()
	if dec.Decode(&args) != nil {
		return values
	}
	for name, v := range args {
		if params, ok := v.(map[string]any); ok && name == "args" {
			for param, value := range params {
				set(paramPrefix, param, value)
			}
			continue
		}
		set(argPrefix, name, v)
	}
	return values
}

// programArguments makes the fields of cmd.run: the programs that the agent's
// policy allows, and the parameters that it declares for the chosen one.
func (d *runPage) programArguments(values url.Values) string {
	f := field{Name: argPrefix + "program", Label: "Program", Sort: "choice", Required: true, Value: values.Get(argPrefix + "program"), pointer: argsPointer + "/program"}
	var programs []fleet.Program
	if d.agent != nil {
		for _, o := range d.agent.Live.Kinds {
			if o.Name == kinds.Run {
				programs = o.Programs
			}
		}
	}
	if len(programs) == 0 {
		f.Sort, f.Help = "text", "The agent has not said which programs it allows. Name one of its policy file."
	} else if f.Value == "" {
		f.Value = programs[0].Name
	}
	var params schema
	for _, p := range programs {
		f.Options = append(f.Options, option{Value: p.Name, Text: p.Name})
		if p.Name == f.Value {
			params, d.Note = readSchema(p.ParamsSchema), p.Description
		}
	}
	if len(programs) > 0 && !slices.ContainsFunc(programs, func(p fleet.Program) bool { return p.Name == f.Value }) {
		f.Options = append(f.Options, option{Value: f.Value, Text: f.Value + ", not allowed by this agent"})
	}
	f.choose()
	if f.Value == "" {
		f.Error = "is missing"
	}
	d.Program = &f
	d.Fields = fieldsOf(params, paramPrefix, argsPointer+"/args", values)
	inner, _ := object(d.Fields)
	name, _ := json.Marshal(f.Value) // of a text it cannot fail
	extra := [][2]string{{"program", string(name)}}
	if inner != "{}" {
		extra = append(extra, [2]string{"args", inner})
	}
	args, _ := object(nil, extra...)
	return args
}

// links lead to the same task as JSON or as fields.
func (d *runPage) links(q url.Values, args string) {
	if d.Raw != nil && readSchema(d.Kind.Schema).open() {
		return
	}
	out := url.Values{"agent": {d.Agent.Value}, "kind": {d.Kind.Name}}
	for _, name := range []string{"timeout", "priority"} {
		if v := q.Get(name); v != "" {
			out.Set(name, v)
		}
	}
	if len(args) <= maxRepeatArgs {
		out.Set("args", args)
	}
	if d.Raw != nil {
		d.ToFields = "/run?" + out.Encode()
		return
	}
	out.Set("raw", "1")
	d.ToRaw = "/run?" + out.Encode()
}
