# Completion of ctx(1) for fish: asks ctx what could come next.

function __ctx_complete
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    set -l current (commandline --current-token --cut-at-cursor)
    for line in ($words[1] __complete -- $words[2..-1] "$current" 2>/dev/null)
        switch $line
            case ':files*'
                __fish_complete_path "$current"
            case ':directories*'
                __fish_complete_directories "$current"
            case ':programs*'
                complete -C "$current"
            case '*'
                echo $line
        end
    end
end

complete --command ctx --no-files --arguments '(__ctx_complete)'
