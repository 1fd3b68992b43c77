{{- /* The name of all objects: the release's, or fullnameOverride. Refused are names that some object may not have. */}}
{{- define "tramontane.fullname" -}}
{{- $name := default .Release.Name .Values.fullnameOverride -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name of the release is %s; it must be small letters, digits and dashes, with a letter first" $name) -}}
{{- end -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "the name of the release, %s, has %d characters; it may have 47" $name (len $name)) -}}
{{- end -}}
{{- if or (hasSuffix "-redis" $name) (has $name (list "y" "n" "on" "off" "yes" "no" "true" "false" "null")) -}}
{{- fail (printf "the name of the release may not be %s, which means something else; choose another" $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}
