package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/text"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

//go:embed static
var static embed.FS

// contents is the page with the order of all pages.
const contents = "docs/README.md"

// site is a site while it is built.
type site struct {
	from  fs.FS
	md    goldmark.Markdown
	pages map[string]*page  // by path in the repository
	todo  []string          // pages to read
	files map[string][]byte // the result, by path in the site
}

// page is a page of the documentation.
type page struct {
	path, title string
	source      []byte
	tree        ast.Node
	sections    []section
}

// section is an entry of the search: a heading with the text below it.
type section struct {
	URL     string `json:"u"` // from the root of the site
	Page    string `json:"p"` // title
	Heading string `json:"h"`
	Text    string `json:"x"`
}

// build renders the documentation of a repository. The result has the files of the site.
func build(from fs.FS) (map[string][]byte, error) {
	s := &site{from: from, pages: map[string]*page{}, files: map[string][]byte{},
		md: goldmark.New(goldmark.WithExtensions(extension.Table, extension.Linkify),
			goldmark.WithParserOptions(parser.WithAutoHeadingID()))}
	s.todo = []string{"README.md", contents}
	err := fs.WalkDir(from, "docs", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && path.Ext(name) == ".md" {
			s.todo = append(s.todo, name)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	for len(s.todo) > 0 {
		name := s.todo[0]
		s.todo = s.todo[1:]
		if s.pages[name] == nil {
			if err := s.read(name); err != nil {
				return nil, err
			}
		}
	}
	return s.files, s.write()
}

// read reads a page, and follows its links.
func (s *site) read(name string) error {
	source, err := fs.ReadFile(s.from, name)
	if err != nil {
		return err
	}
	context := parser.NewContext(parser.WithIDs(&anchors{}))
	p := &page{path: name, title: name, source: source,
		tree: s.md.Parser().Parse(text.NewReader(source), parser.WithContext(context))}
	s.pages[name] = p
	err = ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		var err error
		switch n := n.(type) {
		case *ast.Link:
			if entering {
				n.Destination, err = s.link(p, n.Destination)
			}
		case *ast.Image:
			if entering {
				n.Destination, err = s.link(p, n.Destination)
			}
		}
		return ast.WalkContinue, err
	})
	p.split()
	return err
}

// link returns the link of a page in the site. A linked page is read later, and another linked file is copied.
func (s *site) link(p *page, to []byte) ([]byte, error) {
	name, anchor, hasAnchor := strings.Cut(string(to), "#")
	if name == "" || strings.Contains(name, ":") {
		return to, nil
	}
	target := path.Join(path.Dir(p.path), name)
	info, err := fs.Stat(s.from, target)
	if err != nil {
		return nil, fmt.Errorf("%s links to %s: %w", p.path, to, err)
	}
	if info.IsDir() {
		target = path.Join(target, "README.md")
	}
	if path.Ext(target) == ".md" {
		s.todo = append(s.todo, target)
	} else if s.files[target], err = fs.ReadFile(s.from, target); err != nil {
		return nil, err
	}
	link := relative(address(p.path), address(target))
	if hasAnchor {
		link += "#" + anchor
	}
	return []byte(link), nil
}

// address returns the path of a file in the site.
func address(name string) string {
	if path.Base(name) == "README.md" {
		return path.Join(path.Dir(name), "index.html")
	}
	if path.Ext(name) == ".md" {
		return strings.TrimSuffix(name, ".md") + ".html"
	}
	return name
}

// relative returns the link from a file of the site to another one.
func relative(from, to string) string {
	rel, err := filepath.Rel(path.Dir(from), to)
	if err != nil {
		panic(err) // both are relative
	}
	return filepath.ToSlash(rel)
}

// split divides the text of a page into sections.
func (p *page) split() {
	url := address(p.path)
	current := section{URL: url}
	var body strings.Builder
	end := func() {
		current.Text = strings.Join(strings.Fields(body.String()), " ")
		if current.Heading != "" {
			p.sections = append(p.sections, current)
		}
		body.Reset()
	}
	for n := p.tree.FirstChild(); n != nil; n = n.NextSibling() {
		h, ok := n.(*ast.Heading)
		if !ok {
			p.addText(&body, n)
			continue
		}
		end()
		var title strings.Builder
		p.addText(&title, h)
		current = section{URL: url, Heading: strings.TrimSpace(title.String())}
		if h.Level == 1 {
			p.title = current.Heading
		} else if id, ok := h.AttributeString("id"); ok {
			current.URL += "#" + string(id.([]byte))
		}
	}
	end()
	for i := range p.sections {
		p.sections[i].Page = p.title
	}
}

// addText adds the text of a node.
func (p *page) addText(b *strings.Builder, n ast.Node) {
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			if n.Type() == ast.TypeBlock {
				b.WriteByte(' ')
			}
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Text:
			b.Write(n.Segment.Value(p.source))
			if n.SoftLineBreak() || n.HardLineBreak() {
				b.WriteByte(' ')
			}
		case *ast.AutoLink:
			b.Write(n.Label(p.source))
		case *ast.CodeBlock, *ast.FencedCodeBlock:
			b.Write(n.Lines().Value(p.source))
		}
		return ast.WalkContinue, nil
	})
}

// entry is a line of the navigation. Only links have a page.
type entry struct {
	Text, Page string
	Level      int // of headings: 2 or 3
}

// navigation returns the headings and links of docs/README.md.
func (s *site) navigation() (list []entry) {
	p := s.pages[contents]
	for n := p.tree.FirstChild(); n != nil; n = n.NextSibling() {
		switch n.(type) {
		case *ast.Heading, *ast.Paragraph:
			var t strings.Builder
			p.addText(&t, n)
			level := 3
			if h, ok := n.(*ast.Heading); ok {
				level = h.Level
			} else if _, strong := n.FirstChild().(*ast.Emphasis); !strong || n.ChildCount() > 1 {
				continue // prose
			}
			if level > 1 {
				list = append(list, entry{Text: strings.TrimSpace(t.String()), Level: level})
			}
		case *ast.List:
			_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
				if link, ok := n.(*ast.Link); ok && entering {
					var t strings.Builder
					p.addText(&t, link)
					list = append(list, entry{Text: t.String(), Page: path.Join("docs", string(link.Destination))})
				}
				return ast.WalkContinue, nil
			})
		}
	}
	return list
}

// view has the fields of the template.
type view struct {
	Title, Version, Root, Here string
	Body                       template.HTML
	Navigation                 []entry
}

// Link returns the link from the page to another file of the site.
func (v *view) Link(to string) string { return relative(v.Here, to) }

// write renders all pages and the index of the search.
func (s *site) write() error {
	layout, err := template.ParseFS(static, "static/page.html")
	if err != nil {
		return err
	}
	navigation := s.navigation()
	var index []section
	for _, name := range slices.Sorted(maps.Keys(s.pages)) {
		p := s.pages[name]
		index = append(index, p.sections...)
		var body, out bytes.Buffer
		if err := s.md.Renderer().Render(&body, p.source, p.tree); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		here := address(name)
		v := &view{Title: p.title, Version: cli.Release, Here: here, Root: strings.Repeat("../", strings.Count(here, "/")),
			Body: template.HTML(body.String()), Navigation: navigation}
		if err := layout.Execute(&out, v); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		s.files[here] = out.Bytes()
	}
	encoded, err := json.Marshal(index)
	if err != nil {
		return err
	}
	s.files["search-index.js"] = slices.Concat([]byte("kvatlasIndex = "), encoded, []byte(";\n"))
	for _, name := range []string{"site.css", "site.js"} {
		if s.files[name], err = static.ReadFile("static/" + name); err != nil {
			return err
		}
	}
	return nil
}
