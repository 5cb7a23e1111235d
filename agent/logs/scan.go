package logs

import "bytes"

// The forms of secrets are found by hand-written scanners: the same written as
// regular expressions read 2 MB/s, and a bundle has 64.

// keyword tells a secret by the name before it: NAME, perhaps a quote, ':' or
// '=', and the value.
type keyword struct {
	name string // lower case
	// line: the value is the rest of the line; else one word.
	line bool
}

var keywords = []keyword{
	{"authorization", true}, {"x-auth-token", true}, {"cookie", true},
	{"password", false}, {"passwd", false}, {"passphrase", false},
	{"secret_key", false}, {"secretkey", false}, {"client_secret", false}, {"clientsecret", false},
	{"access_token", false}, {"accesstoken", false}, {"api_key", false}, {"apikey", false},
	// As arguments only: a log's "token=" is a token's name, never its value.
	{"--token", false}, {"--secret", false},
}

// maxGap bounds the blanks between a name and its value.
const maxGap = 16

// formSpans finds what is told by its form: join tokens, JWTs and JWEs,
// passwords in URLs, and values behind a keyword.
func formSpans(data []byte) (found []span) {
	each(data, []byte("bcjt_"), func(at int) int {
		end := run(data, at, isToken)
		found = append(found, span{at, at, end, isToken})
		return end
	})
	// A base64url JSON object, and what follows it, is a JWT or a JWE (RFC
	// 7515, 7516: compact serialization).
	const shortest = 12
	each(data, []byte("eyJ"), func(at int) int {
		end := run(data, at, isToken)
		if end-at >= shortest {
			found = append(found, span{at, at, end, isToken})
		}
		return end
	})
	each(data, []byte("://"), func(at int) int {
		end := at + 3
		// RFC 3986, section 3.2.1: user:password@ before a host.
		colon := run(data, end, isUser)
		if colon == len(data) || data[colon] != ':' {
			return end
		}
		stop := run(data, colon+1, isPassword)
		// A password may hold an '@'; the last one ends it.
		if last := bytes.LastIndexByte(data[colon+1:stop], '@'); last > 0 {
			found = append(found, span{at, colon + 1, colon + 1 + last, nil})
		}
		return end
	})
	lower := lowered(data)
	for _, k := range keywords {
		each(lower, []byte(k.name), func(at int) int {
			end := at + len(k.name)
			if s, ok := k.value(data, end); ok {
				s.start = at
				found = append(found, s)
				return s.to
			}
			return end
		})
	}
	return found
}

// value finds the value behind a keyword that ends at at.
func (k keyword) value(data []byte, at int) (span, bool) {
	at = skip(data, at, `\"'`, 2)
	at = skip(data, at, " \t", maxGap)
	if at == len(data) || data[at] != ':' && data[at] != '=' {
		return span{}, false
	}
	at = skip(data, at+1, " \t", maxGap)
	belongs := isLine
	if !k.line {
		at = skip(data, at, `\"'`, 2)
		belongs = isWord
	}
	end := run(data, at, belongs)
	return span{from: at, to: end, goesOn: belongs}, end > at
}

// each calls f with every place of needle; f says where to go on.
func each(data, needle []byte, f func(at int) (next int)) {
	for at := 0; ; {
		i := bytes.Index(data[at:], needle)
		if i < 0 {
			return
		}
		at = f(at + i)
	}
}

func run(data []byte, at int, belongs func(byte) bool) int {
	for at < len(data) && belongs(data[at]) {
		at++
	}
	return at
}

func skip(data []byte, at int, set string, most int) int {
	for end := at + most; at < min(end, len(data)) && bytes.IndexByte([]byte(set), data[at]) >= 0; {
		at++
	}
	return at
}

func lowered(data []byte) []byte {
	out := make([]byte, len(data))
	for i, b := range data {
		if b >= 'A' && b <= 'Z' {
			b += 'a' - 'A'
		}
		out[i] = b
	}
	return out
}

func isToken(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '_' || b == '-' || b == '.'
}
func isLine(b byte) bool { return b != '\n' && b != '\r' }
func isWord(b byte) bool {
	return b > ' ' && b != '"' && b != '\'' && b != ',' && b != ';' && b != '&'
}
func isPassword(b byte) bool {
	return b > ' ' && b != '/' && b != '?' && b != '#' && b != '"' && b != '\'' && b != '<' && b != '>'
}
func isUser(b byte) bool { return isPassword(b) && b != ':' && b != '@' }
